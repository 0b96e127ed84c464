#!/bin/busybox sh
# Process 1 of the guest (see guest.sh): modules, this machine's root under an overlay, the job, power off.
B=/bin/busybox
$B mkdir -p /proc /sys /dev /mnt /lower /upper
$B mount -t proc proc /proc
$B mount -t sysfs sys /sys
$B mount -t devtmpfs dev /dev
while read -r module; do $B insmod /modules/$module 2>/dev/null || echo "guest: cannot load $module"; done </order
$B mount -t 9p -o trans=virtio,version=9p2000.L,ro,cache=loose,msize=524288 root /lower || $B poweroff -f
$B mount -t tmpfs tmpfs /upper
$B mkdir -p /upper/files /upper/work
$B cp -a /userland/. /upper/files/ && $B rm -rf /userland
$B mount -t overlay -o lowerdir=/lower,upperdir=/upper/files,workdir=/upper/work overlay /mnt || $B poweroff -f
$B mkdir -p /mnt/proc /mnt/sys /mnt/dev /mnt/run /mnt/mnt/shared /mnt/mnt/out
for folder in proc sys dev; do $B mount --move /$folder /mnt/$folder; done
$B mkdir -p /mnt/dev/pts /mnt/dev/shm
$B mount -t tmpfs tmpfs /mnt/run
$B mount -t tmpfs tmpfs /mnt/dev/shm
$B mount -t devpts devpts /mnt/dev/pts
for share in shared out; do
  $B mount -t 9p -o trans=virtio,version=9p2000.L,rw,msize=524288 $share /mnt/mnt/$share 2>/dev/null
done
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TERM=dumb
$B chroot /mnt /mnt/shared/job
echo $? >/mnt/mnt/shared/status
$B sync
$B poweroff -f
