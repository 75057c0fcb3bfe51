#!/bin/sh
# Usage: check_host_closure.sh HEADER COMPILER [FLAG...]: fails if HEADER opens a file of the CUDA toolkit or of cuda/.
set -eu
header=$1
shift
opened=$(echo "#include <$header>" | "$@" -M -x c++ - | tr ' \\' '\n\n' | grep . | sort -u)

count=$(echo "$opened" | grep -c '/')
if [ "$count" -lt 10 ]; then
  echo "only $count files opened by $header: the list of the compiler was not understood" >&2
  exit 1
fi

# Wherever the tree itself lies. Eigen's src/Core/arch/CUDA is Eigen's; the toolkit spells itself in small letters.
if echo "$opened" | sed 's|^.*/include/sinkstate/|sinkstate/|' | grep -E '/(cuda[^/]*|cublas[^/]*|cusolver[^/]*|curand[^/]*)\.h$|/(cub|thrust)/|cuda|\.cuh$'; then
  echo "$header opens the CUDA headers above" >&2
  exit 1
fi
echo "$count files opened by $header, none of CUDA"
