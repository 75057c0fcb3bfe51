#!/bin/sh
# The code that README.md shows is the marked part of a program that is built and run.
# usage: check_readme.sh README QUICKSTART
set -eu
shown=$(awk '/^```cpp$/ { inside = 1; next } /^```$/ { if (inside) exit } inside' "$1")
built=$(awk '/\[quickstart\]/ { inside = !inside; next } inside' "$2")
if [ "$shown" != "$built" ]; then
  echo "$1 shows other code than the marked part of $2 holds:"
  printf '%s\n' "$shown"
  exit 1
fi
[ -n "$shown" ]
