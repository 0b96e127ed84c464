#!/usr/bin/env bash
# In the guest: the transports' contract, readers that stop, and RDMA's own tests, then the bandwidth. `all.sh PYTHON`.
set -uo pipefail
cd "$(dirname "$0")/../.."
"$1" -m pytest -p no:cacheprovider -k rdma \
  tests/store/test_transport_contract.py tests/store/test_stopped_readers.py tests/rdma || exit
"$1" tests/rdma/bandwidth.py /mnt/out/rdma.json
