# Sourced in the guest before the job: rxe0 and rxe1 at the ends of a cable, and a network namespace for a second host.
export HOME=/root TERM=dumb PYTHONDONTWRITEBYTECODE=1 OPENBLAS_NUM_THREADS=1 HALFMOON_RDMA_DEVICES="rxe0 rxe1"
ulimit -l unlimited
ip link set lo up
ip link add veth0 type veth peer name veth1
for i in 0 1; do
  ip addr add 10.77.0.$((i + 1))/24 dev veth$i
  ip link set veth$i mtu 9000 up
done
# One host's kernel would keep packets from one of its addresses to the other inside: send them over the cable.
for i in all veth0 veth1; do echo 1 >/proc/sys/net/ipv4/conf/$i/accept_local; echo 0 >/proc/sys/net/ipv4/conf/$i/rp_filter; done
ip rule add pref 10 iif lo from 10.77.0.1 to 10.77.0.2 lookup 101
ip rule add pref 11 iif lo from 10.77.0.2 to 10.77.0.1 lookup 102
ip route add 10.77.0.0/24 dev veth0 table 101
ip route add 10.77.0.0/24 dev veth1 table 102
ip rule add pref 100 lookup local
ip rule del pref 0
rdma link add rxe0 type rxe netdev veth0 && rdma link add rxe1 type rxe netdev veth1 || exit 99
# The second host: reached by TCP at 10.78.0.2. A device belongs to all namespaces (rdma system: netns shared).
ip netns add far
ip link add cable0 type veth peer name cable1
ip link set cable1 netns far
ip addr add 10.78.0.1/24 dev cable0 && ip link set cable0 up
ip netns exec far sh -c 'ip link set lo up; ip addr add 10.78.0.2/24 dev cable1; ip link set cable1 up'
for i in 1 2 3 4 5 6 7 8 9 10; do
  [ "$(rdma link | grep -c 'state ACTIVE')" = 2 ] && break
  sleep 0.2
done
read -r up _ </proc/uptime
echo "guest: $(uname -r), rxe0 and rxe1 ready after $up s"
