#!/bin/bash
# A run of a recipe in commands of at most ten minutes: bash models/smol-sala/run/run.sh N CARRIED OUT
#   1  unpack, and the speed of the loop (random weights; fills the compile caches)
#   2  the teacher writes
#   3  train, pack what there is
#   4  train to the end, pack, answer, measure
# CARRIED holds the pieces of `run.py pieces`; files stay in $WORK between the commands.
set -u
WORK=${WORK:-/tmp/run}
stage=$1 carried=$2 out=$3
mkdir -p "$WORK/vendor"
for wheel in "$carried"/*/*.whl; do
  [ -f "$wheel" ] && python3 -m zipfile -e "$wheel" "$WORK/vendor"
done
export PYTHONPATH=$PWD:$WORK/vendor PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=true
export TORCHINDUCTOR_CACHE_DIR=$WORK/inductor TRITON_CACHE_DIR=$WORK/triton TORCHINDUCTOR_FX_GRAPH_CACHE=1
run() { python3 models/smol-sala/run/run.py "$@"; }
run gather "$carried" "$WORK" || exit 1
case $stage in
  1) run profile "$WORK" "$out" --minutes "${MINUTES:-1.6}" ;;
  2) run run "$WORK" "$out" --only-write --minutes "${MINUTES:-6}" ;;
  3) run run "$WORK" "$out" --minutes "${MINUTES:-9}" ${SECONDS_IN_ALL:+--seconds $SECONDS_IN_ALL} ;;
  4) run run "$WORK" "$out" --minutes "${MINUTES:-8}" ${SECONDS_IN_ALL:+--seconds $SECONDS_IN_ALL} && run finish "$WORK" "$out"
     timeout "${MEASURE:-75}" python3 models/smol-sala/measure.py "$WORK/teacher" "$WORK/served" "$WORK/build/corpus" \
       --parts typed --lengths 8192 --trials 4 --device cuda -o "$out/results.json" ;;
esac 2>&1 | tee "$out/log-$stage.txt"
