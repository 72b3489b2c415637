# shellcheck shell=bash
# Read by the scripts beside it; not a program.

# Everything that is fetched is kept here. Deleting it is always safe; while no script runs, that is.
cache=${VERDICT_CACHE:-${XDG_CACHE_HOME:-${HOME:?}/.cache}/verdict}

# The kernels there are guests for, and the Debian release each is the kernel of. A release under way moves on: the line that
# `matrix` prints says which kernel it really was.
kernels='5.10 6.1 6.12 7.2'

suite_of_kernel() {
	case $1 in
	5.10) echo bullseye ;;
	6.1) echo bookworm ;;
	6.12) echo trixie ;;
	7.2) echo forky ;;
	*) fail "no guest with Linux $1; there are: $kernels" ;;
	esac
}

fail() {
	echo "guest: $*" >&2
	exit 1
}

# for_kube_proxy: the arguments of `run` that give a guest what kube-proxy writes with, and what iptables loads to match by.
for_kube_proxy() {
	local name
	for name in iptables iptables-save iptables-restore ip6tables ip6tables-save ip6tables-restore ipset; do
		echo "-p $name"
	done
	echo "-f $(matches)"
}

# for_iptables: the arguments of `run` that give a guest both variants of iptables, for both families.
for_iptables() {
	local family variant verb
	for family in iptables ip6tables; do
		for variant in '' -legacy -nft; do
			for verb in '' -save -restore; do
				echo "-p $family$variant$verb"
			done
		done
	done
	echo "-f $(matches)"
}

# matches: the directory of what iptables loads to match by.
matches() { dirname "$(find /usr/lib -path '*/xtables/libxt_comment.so' -print -quit)"; }

# lock NAME: one script at a time may fill that part of the cache, until it ends.
lock() {
	mkdir -p "$cache"
	exec 9>"$cache/$1.lock"
	flock 9
}
