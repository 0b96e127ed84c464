#!/usr/bin/env bash
# Runs a command in a small guest machine that has two RDMA devices, and ends with the command's exit status.
#
#   tests/rdma/guest.sh COMMAND [ARGS...]
#
# The guest is Debian's kernel under QEMU. Its root is this machine's own, read-only, under an overlay in the guest's
# memory, so that the checkout and its environment run as they are, in the same directory; /mnt/out is a folder of this
# machine that the guest may write to (OUT=..., default: none is kept). Its devices are soft-RoCE: rxe0 (10.77.0.1) and
# rxe1 (10.77.0.2), at the two ends of a virtual cable that really carries their packets.
#
# Needs root, Debian on amd64, and its package archive, from which it takes the kernel, rdma-core and perftest, unpacked
# in a cache (HALFMOON_RDMA_CACHE) and never installed; QEMU, busybox-static, kmod and cpio are installed when they are
# missing. Exit status 77, with the reason, where these cannot be had. SMP, MEM and TIMEOUT (seconds) can be set.

set -euo pipefail

HERE=$(cd "$(dirname "$0")" && pwd)
CACHE=${HALFMOON_RDMA_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/halfmoon-rdma}
SMP=${SMP:-2} MEM=${MEM:-4G} TIMEOUT=${TIMEOUT:-900}

say() { printf 'guest: %s\n' "$*" >&2; }
skip() { say "skipped: $*"; exit 77; }

[[ $# -gt 0 ]] || { sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; exit 2; }
[[ $(uname -m) == x86_64 ]] || skip "the guest is for x86_64, this is $(uname -m)"
[[ $(id -u) == 0 ]] || skip "only root may share / with a guest"
command -v apt-get >/dev/null || skip "no apt-get: the guest is made of Debian's packages"
mkdir -p "$CACHE/packages"

# --- programs on this machine ---------------------------------------------------------------------------------------

lists() { [[ -n $(ls /var/lib/apt/lists/*_Packages* 2>/dev/null) ]] || apt-get update -q >"$CACHE/apt.log" 2>&1; }
fetch() { (cd "$CACHE/packages" && rm -f ./*.deb && apt-get download -q "$@" >"$CACHE/apt.log" 2>&1); }

missing=()
for program in qemu-system-x86_64:qemu-system-x86 depmod:kmod cpio:cpio busybox:busybox-static; do
  command -v "${program%%:*}" >/dev/null || missing+=("${program##*:}")
done
if [[ ${#missing[@]} -gt 0 ]]; then
  say "installing ${missing[*]}"
  lists || skip "no package lists: $(tail -n 1 "$CACHE/apt.log")"
  DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}" >"$CACHE/apt.log" 2>&1 ||
    skip "cannot install ${missing[*]}: $(tail -n 1 "$CACHE/apt.log")"
fi

# --- kernel and RDMA userland, unpacked -------------------------------------------------------------------------------

kernel=$CACHE/kernel
if [[ ! -e $kernel/.done ]]; then
  rm -rf "$kernel" && mkdir -p "$kernel"
  lists || skip "no package lists: $(tail -n 1 "$CACHE/apt.log")"
  # Not the kernel for clouds, which has no rdma_rxe.
  package=$(apt-cache depends linux-image-amd64 | awk '/Depends:/ { print $2; exit }')
  fetch "$package" || skip "cannot download the kernel: $(tail -n 1 "$CACHE/apt.log")"
  modules=./lib/modules/${package#linux-image-}
  dpkg-deb --fsys-tarfile "$CACHE"/packages/linux-image-*.deb | tar x -C "$kernel" --wildcards './boot/vmlinuz-*' \
    "$modules/modules.*" "$modules"/kernel/{fs,lib,crypto,net,arch} "$modules"/kernel/drivers/{virtio,block} \
    "$modules"/kernel/drivers/char/hw_random "$modules/kernel/drivers/net/*.ko" \
    "$modules"/kernel/drivers/infiniband/{core,sw/rxe}
  depmod -b "$kernel" "${package#linux-image-}"
  touch "$kernel/.done"
fi
version=$(ls "$kernel/lib/modules")

userland=$CACHE/userland
if [[ ! -e $userland/.done ]]; then
  rm -rf "$userland" && mkdir -p "$userland/opt/pyverbs"
  lists || skip "no package lists: $(tail -n 1 "$CACHE/apt.log")"
  fetch python3-pyverbs libibverbs1 ibverbs-providers librdmacm1 libnl-3-200 libnl-route-3-200 libibumad3 libpci3 \
    ibverbs-utils perftest iproute2 libbpf1 libelf1 libmnl0 libcap2 libcap2-bin libxtables12 libtirpc3 ||
    skip "cannot download rdma-core: $(tail -n 1 "$CACHE/apt.log")"
  for package in "$CACHE"/packages/*.deb; do dpkg-deb -x "$package" "$userland"; done
  for folder in bin sbin lib; do  # they are links in the guest's root
    [[ -d $userland/$folder ]] || continue
    mkdir -p "$userland/usr/$folder" && cp -a "$userland/$folder/." "$userland/usr/$folder/"
    rm -rf "${userland:?}/$folder"
  done
  # pyverbs alone on the path, without Debian's other Python packages.
  mv "$userland/usr/lib/python3/dist-packages/pyverbs" "$userland/opt/pyverbs/"
  touch "$userland/.done"
fi
rm -f "$CACHE"/packages/*.deb

initrd=$CACHE/initrd-$version
if [[ ! -s $initrd || $HERE/init.sh -nt $initrd || $userland/.done -nt $initrd ]]; then
  tree=$(mktemp -d)
  mkdir -p "$tree"/{bin,modules,userland}
  cp /bin/busybox "$tree/bin/busybox"
  for module in virtio_pci 9p 9pnet_virtio overlay veth virtio_rng ib_uverbs rdma_cm rdma_ucm ib_umad crc32_generic rdma_rxe; do
    modprobe -d "$kernel" -S "$version" --show-depends --ignore-install $module 2>/dev/null | awk '$1 == "insmod" { print $2 }'
  done | awk '!seen[$0]++' | while read -r module; do
    cp "$module" "$tree/modules/" && basename "$module" >>"$tree/order"
  done
  cp -a "$userland/." "$tree/userland/" && rm -rf "$tree"/userland/usr/share/{doc,man} "$tree/userland/.done"
  install -m 755 "$HERE/init.sh" "$tree/init"
  (cd "$tree" && find . | cpio -o -H newc -R 0:0 --quiet) >"$initrd.new" && mv "$initrd.new" "$initrd"
  rm -rf "$tree"
fi

# --- the guest --------------------------------------------------------------------------------------------------------

shared=$(mktemp -d)
trap 'rm -rf "$shared"' EXIT
{
  echo '#!/bin/sh'
  echo "cd $(printf %q "$PWD") || exit 98"
  # What tests may be told by the environment.
  export -p | grep -E '^declare -x (VIRTUAL_ENV|PYTHONPATH|CI|HALFMOON_[A-Z_]*|PATH)=' | sed 's/^declare -x/export/'
  echo "export IN_GUEST=1 PYTHONPATH=\${PYTHONPATH:+\$PYTHONPATH:}/opt/pyverbs"
  cat "$HERE/network.sh"
  printf '%q ' "$@"
  echo
} >"$shared/job"
chmod +x "$shared/job"

accel=(-accel tcg,thread=multi,tb-size=512 -cpu max,erms=off,fsrm=off)
# /dev/kvm may be there and not work: the processor must say so too.
if grep -qwE 'vmx|svm' /proc/cpuinfo && [[ -w /dev/kvm ]]; then accel=(-accel kvm -cpu host); fi
export_out=()
if [[ -n ${OUT:-} ]]; then
  mkdir -p "$OUT"
  export_out=(-fsdev "local,id=out,path=$OUT,security_model=none" -device virtio-9p-pci,fsdev=out,mount_tag=out)
fi
started=$SECONDS
set +e
timeout -k 5 "$TIMEOUT" qemu-system-x86_64 -nodefaults -no-user-config -display none -no-reboot -M q35,smm=off \
  "${accel[@]}" -smp "$SMP" -m "$MEM" -kernel "$kernel/boot/vmlinuz-$version" -initrd "$initrd" \
  -append "console=ttyS0 quiet loglevel=3 panic=-1 mitigations=off random.trust_cpu=on clocksource=hpet no_timer_check" \
  -fsdev local,id=root,path=/,security_model=none,readonly=on,multidevs=remap \
  -device virtio-9p-pci,fsdev=root,mount_tag=root \
  -fsdev "local,id=shared,path=$shared,security_model=none" -device virtio-9p-pci,fsdev=shared,mount_tag=shared \
  "${export_out[@]}" -device virtio-rng-pci -serial stdio -monitor none </dev/null
qemu=$?
status=$(cat "$shared/status" 2>/dev/null || echo 96)
say "ended after $((SECONDS - started)) s, status $status$([[ $qemu == 0 ]] || echo " (QEMU: $qemu)")"
exit "$status"
