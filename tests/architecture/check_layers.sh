#!/bin/sh
# Usage: check_layers.sh INCLUDE_DIR: reads the headers below INCLUDE_DIR/sinkstate and prints each broken rule.
#
#   layer 0  version.hpp, config.hpp      layer 3  algorithm/
#   layer 1  core/                        layer 4  host/ or cuda/
#   layer 2  model/                       layer 5  sinkstate.hpp, sinkstate_cuda.cuh
#
# A header includes its own layer, without cycles, and lower ones. host/ and cuda/ never meet, not even through a third
# header. Eigen is for host/, CUDA headers are for cuda/. Macros start with SINKSTATE_. Each header has `#pragma once`.
set -eu
cd "$1"
[ -d sinkstate ] || { echo "no sinkstate/ in $1" >&2; exit 2; }
find sinkstate -type f | LC_ALL=C sort | xargs awk '
function layer(path) {
  if (path ~ /^sinkstate\/(version|config)\.hpp$/) return 0
  if (path ~ /^sinkstate\/core\//) return 1
  if (path ~ /^sinkstate\/model\//) return 2
  if (path ~ /^sinkstate\/algorithm\//) return 3
  if (path ~ /^sinkstate\/(host|cuda)\//) return 4
  if (path ~ /^sinkstate\/(sinkstate\.hpp|sinkstate_cuda\.cuh)$/) return 5
  return -1
}

function complain(where, what) {
  print where ": " what
  broken++
}

# "a/b/../c.hpp" as seen from a file is "a/c.hpp" below the include directory.
function resolve(file, name) {
  if (name ~ /^sinkstate\//) return name
  sub(/[^\/]*$/, "", file)
  name = file name
  while (name ~ /[^\/]+\/\.\.\//) sub(/[^\/]+\/\.\.\//, "", name)
  return name
}

# Depth first: `state` is 1 on the way down and 2 when done; a header met on the way down closes a cycle.
function visit(file, trail,   list, count, i) {
  if (state[file] == 1) { complain(file, "include cycle: " trail); return }
  if (state[file] == 2) return
  state[file] = 1
  if (file ~ /^sinkstate\/host\//) reaches_host[file] = 1
  if (file ~ /^sinkstate\/cuda\//) reaches_cuda[file] = 1
  count = split(included[file], list, " ")
  for (i = 1; i <= count; i++) {
    visit(list[i], trail " -> " list[i])
    if (list[i] in reaches_host) reaches_host[file] = 1
    if (list[i] in reaches_cuda) reaches_cuda[file] = 1
  }
  state[file] = 2
  if ((file in reaches_host) && (file in reaches_cuda)) complain(file, "host/ and cuda/ meet")
}

FNR == 1 {
  files[++total] = FILENAME
  known[FILENAME] = 1
  if (layer(FILENAME) < 0) complain(FILENAME, "belongs to no layer")
}

/^[ \t]*#[ \t]*pragma[ \t]+once/ { guarded[FILENAME] = 1 }

/^[ \t]*#[ \t]*(define|undef)[ \t]/ {
  name = $0
  sub(/^[ \t]*#[ \t]*(define|undef)[ \t]+/, "", name)
  if (name !~ /^SINKSTATE_/) complain(FILENAME ":" FNR, "macro without SINKSTATE_: " name)
}

/^[ \t]*#[ \t]*include/ {
  name = $0
  sub(/^[ \t]*#[ \t]*include[ \t]*/, "", name)
  quoted = name ~ /^"/
  name = substr(name, 2)
  sub(/[">].*$/, "", name)
  if (!quoted && name ~ /^(unsupported\/)?Eigen\// && FILENAME !~ /^sinkstate\/host\//)
    complain(FILENAME ":" FNR, "Eigen outside host/: " name)
  if (!quoted && name ~ /^(cuda|cub|thrust|cooperative_groups|mma\.h)/ && FILENAME !~ /^sinkstate\/(cuda\/|sinkstate_cuda\.cuh$)/)
    complain(FILENAME ":" FNR, "CUDA outside cuda/: " name)
  if (quoted || name ~ /^sinkstate\//) {
    name = resolve(FILENAME, name)
    if (layer(name) > layer(FILENAME)) complain(FILENAME ":" FNR, "includes a higher layer: " name)
    included[FILENAME] = included[FILENAME] " " name
    line[FILENAME, name] = FNR
  }
}

END {
  for (i = 1; i <= total; i++) {
    if (!(files[i] in guarded)) complain(files[i], "no #pragma once")
    count = split(included[files[i]], list, " ")
    for (j = 1; j <= count; j++)
      if (!(list[j] in known)) complain(files[i] ":" line[files[i], list[j]], "no such header: " list[j])
  }
  for (i = 1; i <= total; i++) visit(files[i], files[i])
  if (broken) { print broken " broken rule(s) in " total " headers"; exit 1 }
  print total " headers, no rule broken"
}
'
