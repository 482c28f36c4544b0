#!/bin/bash
# What a GPU that is lent for fifteen minutes tells, in two commands, of 5 and of 6.5 minutes:
#
#     bench/gpu_minutes.sh 1          designs of W, every launch, processes, a rehearsal, W beside cuBLAS
#     bench/gpu_minutes.sh 2          rows that decide, the tests, passes beside each other, virtual stages, other rows,
#                                     tiles of W, the sanitizer
#     bench/gpu_minutes.sh 2 REGEX    in their place the jobs of bench/gpu_session.py with this regular expression
#
# It needs python3 with torch, Triton, pytest and pytest-xdist, and no network. Kernels, and extensions for that Python,
# come from .cache/prepared, if it is there: python -m bench.gpu_prepare .cache/prepared. Results go to the folder OUT (else
# .cache/gpu): session.md, session.json, log.txt, from the first seconds on. REHEARSE=--rehearse: without a GPU.
cd "$(dirname "$0")/.." || exit 2
case "$1" in
  1) seconds=280 jobs='W designs|every launch|processes on one GPU|rehearsal|headline' ;;
  2) seconds=370 jobs='rows|tests|beside|virtual stages|tiles|sanitizer' ;;
  *) sed -n '2,/^cd/{/^cd/!p}' "$0"; exit 2 ;;
esac
exec "${PYTHON:-python3}" -m bench.gpu_session --seconds "${SECONDS_GIVEN:-$seconds}" --only "${2:-$jobs}" \
  --out "${OUT:-.cache/gpu}" --prepared .cache/prepared $REHEARSE
