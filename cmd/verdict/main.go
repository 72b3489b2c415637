//go:build !man

// Verdict is a Kubernetes Service proxy: it makes Services real in the Linux kernel by nftables, written over netlink.
package main

import "os"

func main() { os.Exit(run()) }
