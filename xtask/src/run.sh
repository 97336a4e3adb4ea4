#!/usr/bin/env bash
# Runs the programs of this bundle on a machine that has libtorch but no Rust. `run.sh help` says
# how.
set -uo pipefail

wanted=2.11.0
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) || exit 1
out=${OUT:-$PWD}

usage() {
  cat <<'TEXT'
run.sh COMMAND [ARGUMENTS]

  test [NAME…] [-- ARGUMENTS]   every test program, or the named ones; ARGUMENTS go to each
  bench [WORD…]                 each operator against its rivals, as a table and as bench.json
  tune [SEED] [OPERATOR…] [240s]   measures what each way costs on this GPU, and writes the table by which operators choose
  rivals [WORD…]                what a Python user would call instead (torch.compile; Liger, Quack where installed): rivals.json
  llm [ARGUMENTS]               language models: `llm train`, `llm sample` and others (examples/llm)
  versus-pytorch [ARGUMENTS]    language models in Rust and in PyTorch, in turns: versus.json and versus.svg; --size char|124m|llama-1b,
                                --modes train,lora,muon,decode, --steps N
  criterion [ARGUMENTS]         the same with criterion's statistics
  demo [ARGUMENTS]              the character-level language model
  exec FILE [ARGUMENTS]         any program of the bundle, such as tests/lltm_cell
  sanitize [NAME…]              compute-sanitizer over the CUDA tests, and over planted faults that it must find
  help                          this text

  --require-cuda before COMMAND, or TCH_EXTENSION_REQUIRE_CUDA=1: a missing GPU is a failure, not a skip

LIBTORCH      a libtorch 2.11.0; without it, the torch of python3 (or of $PYTHON)
OUT           where logs and results go; by default the current folder
SANITIZE_FILTER    names of the tests to sanitize contain this; by default `cuda`
SANITIZE_TOOLS     those to run; by default memcheck, memcheck_rounded, initcheck, racecheck and synccheck
SANITIZE_LANES     tests sanitized at the same time, each in a process of its own; by default half of the cores
SANITIZE_SECONDS   a test that takes longer has failed; by default there is no limit
COMPUTE_SANITIZER  the program; by default from PATH, CUDA_HOME, /usr/local/cuda or next to libtorch
TEXT
}

fail() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# --- libtorch -------------------------------------------------------------------------------------

find_libtorch() {
  local python=${PYTHON:-python3}
  if [[ -n ${LIBTORCH:-} ]]; then
    libtorch=$LIBTORCH
  else
    # Find the package without `import torch`, which takes seconds.
    libtorch=$("$python" -c 'import importlib.util as u; print(u.find_spec("torch").submodule_search_locations[0])' 2>/dev/null)
    [[ -n $libtorch ]] || fail "no libtorch: LIBTORCH is not set and $python has no torch
  way out: set LIBTORCH to the folder of a libtorch $wanted, or PYTHON to a Python with torch $wanted"
  fi
  [[ -e $libtorch/lib/libtorch.so ]] || fail "no libtorch: $libtorch/lib/libtorch.so is missing
  way out: set LIBTORCH to the folder of a libtorch $wanted"
}

libtorch_version() {
  local header
  for header in torch/headeronly/version.h torch/csrc/api/include/torch/version.h; do
    [[ -r $libtorch/include/$header ]] || continue
    awk '$2 == "TORCH_VERSION_MAJOR" { a = $3 } $2 == "TORCH_VERSION_MINOR" { b = $3 }
         $2 == "TORCH_VERSION_PATCH" { c = $3 } END { if (a != "") print a "." b "." c }' "$libtorch/include/$header"
  done | grep -m 1 . && return
  # Some installs leave the headers out.
  sed -n "s/^__version__ = '\([0-9.]*\).*/\1/p" "$libtorch/version.py" 2>/dev/null | grep . && return
  cut -d+ -f1 "$libtorch/build-version" 2>/dev/null
}

check_version() {
  [[ -z ${LIBTORCH_BYPASS_VERSION_CHECK:-} ]] || return 0
  local version
  version=$(libtorch_version)
  [[ $version == "$wanted" ]] || fail "the libtorch in $libtorch is version ${version:-unknown}, but $wanted is needed
  way out: set LIBTORCH to a libtorch $wanted (LIBTORCH_BYPASS_VERSION_CHECK=1 tries anyway)"
}

# Makes the loader look for libtorch on this machine, not where it was on the machine that built the
# bundle.
set_library_path() {
  local site folder path=$libtorch/lib
  site=$(cd "$libtorch" && cd "$(pwd -P)/.." && pwd)
  for folder in "$site"/nvidia/*/lib; do
    [[ -d $folder ]] && path+=:$folder
  done
  # The kernels, which all programs share.
  export LD_LIBRARY_PATH=$here/lib:$path${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
}

# Reports missing libraries in one message, instead of letting each program fail.
check_loads() {
  local missing
  missing=$(ldd "$1" 2>/dev/null | awk '/not found/ { print $1 }' | sort -u | tr '\n' ' ')
  [[ -z $missing ]] || fail "libraries are missing for $1: $missing
  way out: if they are CUDA's, use a libtorch with CUDA, or a bundle built with TCH_EXTENSION_CUDA=0"
}

prepare() {
  find_libtorch
  check_version
  set_library_path
  # Cargo sets this variable; the tests and the demo find the repository's files with it.
  export CARGO_MANIFEST_DIR=$here/files
  export TCH_EXTENSION_EXAMPLES=$here/examples
  if [[ -d $here/tvm_ffi ]]; then
    export TCH_EXTENSION_TEST_TVM_FFI=${TCH_EXTENSION_TEST_TVM_FFI:-$here/tvm_ffi}
  fi
  if [[ -e $here/torchvision/_C.so ]]; then
    export TCH_EXTENSION_TORCHVISION=${TCH_EXTENSION_TORCHVISION:-$here/torchvision/_C.so}
  fi
  mkdir -p "$out" || fail "cannot make the folder $out; set OUT to one that can be written"
  out=$(cd "$out" && pwd)
  local program
  for program in "$here"/tests/* "$here"/examples/*; do
    if [[ -f $program ]]; then
      check_loads "$program"
      break
    fi
  done
}

has_gpu() {
  [[ $(nvidia-smi -L 2>/dev/null) == GPU* || -e /dev/nvidia0 ]]
}

# --- test -----------------------------------------------------------------------------------------

# Prints the paths of the named test programs, or of all of them.
test_programs() {
  local name
  if (($# == 0)); then
    printf '%s\n' "$here"/tests/*
    return
  fi
  for name in "$@"; do
    [[ -x $here/tests/$name ]] || fail "there is no test program $name; there are: $(cd "$here/tests" && echo *)"
    printf '%s\n' "$here/tests/$name"
  done
}

# Adds up one of the numbers in libtest's `test result: ok. 3 passed; 0 failed; …`.
count() {
  awk -v what="$1" '/^test result:/ { for (i = 2; i <= NF; i++) if (index($i, what) == 1) sum += $(i - 1) }
                    END { print sum + 0 }' "$2"
}

run_tests() {
  local names=() arguments=() program name log status passed=0 failed=0 programs summary=''
  while (($#)) && [[ $1 != -- ]]; do
    names+=("$1")
    shift
  done
  (($#)) && shift
  arguments=("$@")
  # Tests that ran at the same time on one GPU would disturb one another.
  has_gpu && arguments=(--test-threads=1 "${arguments[@]}")
  programs=$(test_programs "${names[@]}") || exit 1
  for program in $programs; do
    name=${program##*/}
    log=$out/test-$name.log
    printf '\n== %s ==\n' "$name"
    (cd "$here/files" && exec "$program" "${arguments[@]}") 2>&1 | tee "$log"
    status=${PIPESTATUS[0]}
    local good bad
    good=$(count passed "$log")
    bad=$(count failed "$log")
    # A program that crashed has no result line.
    ((status != 0 && bad == 0)) && bad=1
    passed=$((passed + good))
    failed=$((failed + bad))
    summary+=$(printf '%-32s %5d passed %5d failed  exit status %d' "$name" "$good" "$bad" "$status")$'\n'
  done
  printf '\n%s\n%d passed, %d failed\n' "$summary" "$passed" "$failed"
  ((failed == 0 && passed > 0))
}

# --- sanitize -------------------------------------------------------------------------------------

find_sanitizer() {
  local site place
  site=$(cd "$libtorch" && cd "$(pwd -P)/.." && pwd)
  for place in "${COMPUTE_SANITIZER:-}" "$(command -v compute-sanitizer)" "${CUDA_HOME:-}/bin/compute-sanitizer" \
    /usr/local/cuda/bin/compute-sanitizer "$site"/nvidia/cu*/bin/compute-sanitizer; do
    if [[ -x $place ]]; then
      sanitizer=$place
      return
    fi
  done
  fail "compute-sanitizer was not found
  way out: it comes with the CUDA toolkit; name it in COMPUTE_SANITIZER"
}

# memcheck takes an asynchronous copy of fewer than 16 bytes for one of 16 (docs/lab/methods.md).
# memcheck leaves out the kernels of layer_norm that copy like this at an array's end, and
# memcheck_rounded checks only those, with all allocations rounded up to 16 bytes.
copies_of_fewer_than_16_bytes=(backward_ring backward_in_place)

# Sets `skip` to the arguments that leave out what must not run under a tool.
skipped_under() {
  # Tests with gigabytes of data take hours under a sanitizer, and other tests run the same kernels
  # on less.
  skip=(--skip more_than_two_to_the_31)
  # The tools run one kernel after another, so that nothing overtakes a long kernel on another
  # stream, and take memory of the GPU while they run. These tests prove nothing under them.
  skip+=(--skip cuda_a_kernel_waits_for_work_on_the_current_stream --skip cuda_the_first_replay_draws_the_next_numbers)
  skip+=(--skip cuda_many_launches_need_no_memory)
  # initcheck does not see what cuBLAS' products in half kinds and in tf32 write: it even reports
  # libtorch's own operators that read such a product. For initcheck, tf32 products are computed in
  # plain float instead, and the tests in half kinds and under autocast are skipped.
  [[ $1 == initcheck ]] && skip+=(--skip cuda_half_kinds --skip cuda_under_autocast)
  return 0
}

# sanitize_one TOOL PROGRAM LOG TEST ARGUMENTS… runs one test under the tool. The tool's findings go
# to LOG, the program's output to LOG.out.
sanitize_one() {
  local tool=$1 program=$2 log=$3 test=$4 settings=() options=() kernel
  shift 4
  # Without caching, every tensor is an allocation of its own. libtorch's allocator would otherwise
  # hand out pieces of large blocks, and the tool does not report an overrun inside such a block.
  case $tool in
    memcheck* | initcheck) settings=(PYTORCH_NO_CUDA_MEMORY_CACHING=1) ;;
  esac
  # An overrun into the next allocation is not reported either; a gap between the allocations makes
  # it an error.
  [[ $tool == memcheck* ]] && options=(--padding 256)
  for kernel in "${copies_of_fewer_than_16_bytes[@]}"; do
    case $tool in
      memcheck) options+=(--kernel-name-exclude "kns=$kernel") ;;
      memcheck_rounded) options+=(--kernel-name "kns=$kernel") ;;
    esac
  done
  [[ $tool == memcheck_rounded ]] && settings+=("LD_PRELOAD=$here/round_allocations.so")
  [[ $tool == initcheck ]] && settings+=(NVIDIA_TF32_OVERRIDE=0)
  rm -f "$log" "$log.out"
  # Findings are recognised by our names in the backtrace. Host frames are left out of it, because
  # even libtorch's kernels are called by a program of ours.
  (cd "$here/files" && exec timeout -k 10 "${SANITIZE_SECONDS:-0}" env "${settings[@]}" TCH_EXTENSION_REQUIRE_CUDA=1 \
    "$sanitizer" --tool "${tool%_rounded}" "${options[@]}" --show-backtrace device --print-limit 100000 --log-file "$log" \
    "$program" --exact "$test" "$@" --test-threads=1) >"$log.out" 2>&1
}

# racecheck ignores bar.arrive: it even reports a race in the PTX manual's own example of it
# (docs/lab/methods.md). The groups of warps in lltm's grid kernels are ordered by bar.arrive, so
# racecheck's findings there are left out. The probe that delays warps checks those kernels with
# barriers that the tool knows.
unknown_to_racecheck='tch_extension::recurrent::(wide_)?grid::'

# Counts the lines of a tool's findings that name a kernel matching the pattern.
findings() {
  local tool=$1 pattern=$2 log=$3
  grep -E '^=========' "$log" 2>/dev/null | grep -v 'COMPUTE-SANITIZER' |
    if [[ $tool == racecheck ]]; then grep -vE "$unknown_to_racecheck"; else cat; fi | grep -cE "$pattern"
}

# Prints the summary at the end of a log. A log without one means that the tool itself failed and
# for that reason found nothing.
error_summary() {
  grep -hE '(ERROR|RACECHECK) SUMMARY' "$1" 2>/dev/null | sed 's/^=* *//' | tr '\n' ' ' | grep . ||
    printf 'NO SUMMARY: the tool failed, see %s' "$1"
}

# Runs one test under one tool and says what came out.
sanitize_clean() {
  local tool=$1 program=$2 test=$3 name log status ours passed left_out verdict=clean
  name=${program##*/}
  log=$out/sanitize-$tool-$name-${test//::/.}.log
  sanitize_one "$tool" "$program" "$log" "$test"
  status=$?
  ours=$(findings "$tool" 'tch_extension' "$log")
  passed=$(count passed "$log.out")
  if ((ours > 0 || passed == 0 || status != 0)) || ! grep -q 'SUMMARY' "$log"; then
    verdict="FAILED, $ours findings of ours, exit status $status; $(error_summary "$log")"
  elif grep -q '^SKIPPED ' "$log.out"; then
    verdict="skipped, $(grep -m 1 '^SKIPPED ' "$log.out" | sed 's/.*: //')"
  fi
  left_out=$(($(findings every-tool 'tch_extension' "$log") - ours))
  ((left_out == 0)) || verdict+=", $left_out in lltm's grids left out, whose bar.arrive it does not know (docs/lab/methods.md)"
  verdict "$tool" "$name" "$test: $verdict"
}

# Prints a line, and adds it to `sanitize.txt`.
verdict() {
  printf '%-16s %-20s %s\n' "$@" | tee -a "$out/sanitize.txt"
}

sanitize_planted() {
  local tool=$1 test=$2 program=$here/tests/planted log=$out/sanitize-$1-$2.log ours
  if [[ ! -x $program ]]; then
    verdict "$tool" planted "$test: NOT RUN, because the bundle has no tests/planted"
    return
  fi
  sanitize_one "$tool" "$program" "$log" "$test" --include-ignored
  ours=$(findings "$tool" 'tch_extension|planted' "$log")
  if ((ours == 0)); then
    verdict "$tool" planted "$test: NOT FOUND, so a clean result means nothing; $(error_summary "$log")"
  else
    verdict "$tool" planted "$test: found, as it must be"
  fi
}

# in_a_lane COMMAND… starts a command once a lane is free. Each has another one of the GPUs as its
# device 0.
in_a_lane() {
  while (($(jobs -rp | wc -l) >= lanes)); do wait -n; done
  (
    ((${#gpus[@]} == 0)) || export CUDA_VISIBLE_DEVICES=$(rotated $((started % ${#gpus[@]})))
    "$@"
  ) &
  started=$((started + 1))
}

# Ends the children of a process, and theirs.
end_children() {
  local child
  for child in $(pgrep -P "$1"); do
    end_children "$child"
    kill "$child" 2>/dev/null
  done
}

# The GPUs, from number N on.
rotated() {
  local order=("${gpus[@]:$1}" "${gpus[@]:0:$1}")
  (IFS=, && printf '%s' "${order[*]}")
}

run_sanitize() {
  local filter=${SANITIZE_FILTER:-cuda} programs program tool tests test skip lanes most gpus=() checks=() listed=0 before started=0 good i
  find_sanitizer
  IFS=', ' read -r -a gpus <<<"${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader 2>/dev/null | tr '\n' ' ')}"
  # A sanitizer takes memory of its GPU.
  lanes=$((($(nproc) + 1) / 2)) most=$((16 * (${#gpus[@]} > 0 ? ${#gpus[@]} : 1)))
  lanes=${SANITIZE_LANES:-$((lanes < most ? lanes : most))}
  [[ $lanes =~ ^[1-9][0-9]*$ ]] || fail "SANITIZE_LANES is $lanes, not a number of tests"
  # Jobs in the background do not see the keyboard's interrupt.
  trap 'end_children $$; exit 130' INT TERM
  programs=$(test_programs "$@") || exit 1
  for program in $programs; do
    [[ ${program##*/} != planted ]] || continue
    before=$listed
    for tool in ${SANITIZE_TOOLS:-memcheck memcheck_rounded initcheck racecheck synccheck}; do
      skipped_under "$tool"
      tests=$("$program" --list "$filter" "${skip[@]}" 2>/dev/null) || fail "${program##*/} cannot list its tests"
      for test in $(sed -n 's/: test$//p' <<<"$tests"); do
        listed=$((listed + 1))
        [[ $tool != memcheck_rounded || ${program##*/} == layer_norm ]] || continue
        checks+=("$tool $program $test")
      done
    done
    # A program that the user names must be checked, so it is an error if it has no such test.
    ((listed > before || $# == 0)) || fail "no test of ${program##*/} has \`$filter\` in its name"
  done
  ((${#checks[@]} > 0)) || fail "no test's name contains \`$filter\`, or no tool is for it, so nothing was checked"
  : >"$out/sanitize.txt"
  for i in "${checks[@]}"; do
    read -r tool program test <<<"$i"
    in_a_lane sanitize_clean "$tool" "$program" "$test"
  done
  in_a_lane sanitize_planted memcheck planted_overrun
  in_a_lane sanitize_planted racecheck planted_race
  wait
  good=$(grep -cE ': (clean|skipped|found)' "$out/sanitize.txt")
  if ((good < started)); then
    printf '%d of %d checks FAILED; logs are in %s\n' $((started - good)) "$started" "$out"
    return 1
  fi
  printf 'no finding of ours in %d checks (%d more were skipped); the planted faults were found\n' \
    "$(grep -c ': clean' "$out/sanitize.txt")" "$(grep -c ': skipped' "$out/sanitize.txt")"
}

# --- main -----------------------------------------------------------------------------------------

run_program() {
  local program=$1
  shift
  [[ -x $program ]] || fail "the bundle has no $program"
  exec "$program" "$@"
}

if [[ ${1:-} == --require-cuda ]]; then
  export TCH_EXTENSION_REQUIRE_CUDA=1
  shift
fi
command=${1:-help}
(($#)) && shift
case $command in
  test)
    prepare
    run_tests "$@"
    ;;
  bench)
    prepare
    # The benchmark records the commit with its figures.
    OUT=$out TCH_EXTENSION_COMMIT=$(cat "$here/commit" 2>/dev/null) run_program "$here/benches/ops" table "$@"
    ;;
  tune)
    prepare
    OUT=$out run_program "$here/benches/ops" table tune "$@"
    ;;
  rivals)
    OUT=$out exec "${PYTHON:-python3}" "$here/files/benches/rivals.py" "$@"
    ;;
  criterion)
    prepare
    export CRITERION_HOME=${CRITERION_HOME:-$out/criterion}
    run_program "$here/benches/ops" --bench "$@"
    ;;
  demo)
    prepare
    # The same setting as in `cargo xtask demo`: OpenMP's threads sleep soon, which helps on a busy
    # machine.
    [[ -n ${OMP_WAIT_POLICY+set} ]] || export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-20000}
    run_program "$here/examples/char_lltm" "$@"
    ;;
  llm)
    prepare
    run_program "$here/examples/llm" "$@"
    ;;
  versus-pytorch)
    prepare
    exec "${PYTHON:-python3}" "$here/files/examples/llm/versus_pytorch" --llm "$here/examples/llm" --out "$out" "$@"
    ;;
  exec)
    prepare
    (($#)) || fail "exec needs a program, such as tests/lltm_cell"
    program=$1
    shift
    run_program "$here/$program" "$@"
    ;;
  sanitize)
    prepare
    run_sanitize "$@"
    ;;
  help | -h | --help) usage ;;
  *)
    printf 'error: there is no command %s\n' "$command" >&2
    usage >&2
    exit 2
    ;;
esac
