#!/bin/sh
# Usage: check_layers_self_test.sh SCRATCH_DIR: a check that cannot fail proves nothing, so each rule is broken once.
set -eu
check=$(dirname "$0")/check_layers.sh
scratch=$1
failed=0

# A small tree that obeys every rule.
fresh_tree() {
  rm -rf "$scratch"
  mkdir -p "$scratch/sinkstate/core" "$scratch/sinkstate/model" "$scratch/sinkstate/host" "$scratch/sinkstate/cuda"
  header config.hpp '#define SINKSTATE_A'
  header core/view.hpp '#include "../config.hpp"'
  header core/word.hpp '#include "view.hpp"'
  header model/state.hpp '#include "../core/view.hpp"'
  header host/team.hpp '#include <Eigen/Core>' '#include "../model/state.hpp"'
  header cuda/team.cuh '#include <cub/block/block_scan.cuh>' '#include <sinkstate/model/state.hpp>'
  header sinkstate.hpp '#include "host/team.hpp"'
}

header() {
  file=$scratch/sinkstate/$1
  shift
  printf '%s\n' '#pragma once' "$@" > "$file"
}

# must_fail MESSAGE: the check fails now and says MESSAGE, and says nothing else.
must_fail() {
  if output=$(sh "$check" "$scratch"); then
    echo "not noticed: $1"
    failed=1
  elif ! echo "$output" | sed '$d' | grep -qF "$1" || [ "$(echo "$output" | sed '$d' | grep -cvF "$1")" -ne 0 ]; then
    printf 'wanted "%s", got:\n%s\n' "$1" "$output"
    failed=1
  fi
  fresh_tree
}

fresh_tree
sh "$check" "$scratch"

header core/view.hpp '#include "../model/other.hpp"'
header model/other.hpp
must_fail 'sinkstate/core/view.hpp:2: includes a higher layer: sinkstate/model/other.hpp'

header core/view.hpp '#  include <sinkstate/sinkstate_cuda.cuh>'
header sinkstate_cuda.cuh
must_fail 'includes a higher layer: sinkstate/sinkstate_cuda.cuh'

header core/view.hpp '#include "word.hpp"'
must_fail 'include cycle'

header sinkstate.hpp '#include "host/team.hpp"' '#include "cuda/team.cuh"'
must_fail 'sinkstate/sinkstate.hpp: host/ and cuda/ meet'

header cuda/team.cuh '#include "../host/team.hpp"'
must_fail 'sinkstate/cuda/team.cuh: host/ and cuda/ meet'

header model/state.hpp '#include <Eigen/Core>'
must_fail 'sinkstate/model/state.hpp:2: Eigen outside host/'

header cuda/team.cuh '#include <Eigen/Core>'
must_fail 'sinkstate/cuda/team.cuh:2: Eigen outside host/'

header sinkstate_cuda.cuh '#include <Eigen/Core>'
must_fail 'sinkstate/sinkstate_cuda.cuh:2: Eigen outside host/'

header sinkstate_cuda.cuh '#include "cuda/team.cuh"' '#include "sinkstate.hpp"'
must_fail 'sinkstate/sinkstate_cuda.cuh: host/ and cuda/ meet'

header cuda/team.cuh '#define FULL_MASK 0xffffffffu'
must_fail 'sinkstate/cuda/team.cuh:2: macro without SINKSTATE_'

header core/word.hpp '#include <cuda_fp16.h>'
must_fail 'sinkstate/core/word.hpp:2: CUDA outside cuda/'

header core/word.hpp '  #define MAX(a, b) a'
must_fail 'sinkstate/core/word.hpp:2: macro without SINKSTATE_'

header core/word.hpp '#include "gone.hpp"'
must_fail 'sinkstate/core/word.hpp:2: no such header: sinkstate/core/gone.hpp'

header stray.hpp
must_fail 'sinkstate/stray.hpp: belongs to no layer'

echo '#include "view.hpp"' > "$scratch/sinkstate/core/word.hpp"
must_fail 'sinkstate/core/word.hpp: no #pragma once'

exit $failed
