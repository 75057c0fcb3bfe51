#!/bin/sh
# The code that README.md shows is the marked part of programs that are built and run: its first piece that of the first
# program, and so on.
# usage: check_readme.sh README PROGRAM...
set -eu
readme=$1
shift
number=0
for program in "$@"; do
  number=$((number + 1))
  shown=$(awk -v wanted="$number" '/^```cpp$/ { inside = ++n == wanted; next } /^```$/ { inside = 0 } inside' "$readme")
  built=$(awk '/\[quickstart\]/ { inside = !inside; next } inside' "$program")
  if [ -z "$shown" ] || [ "$shown" != "$built" ]; then
    echo "$readme shows other code than the marked part of $program holds:"
    printf '%s\n' "$shown"
    exit 1
  fi
done
pieces=$(grep -c '^```cpp$' "$readme")
[ "$pieces" = "$number" ] || { echo "$readme shows $pieces pieces of code, $number of them checked"; exit 1; }
