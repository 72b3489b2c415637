package main

import (
	"bufio"
	"net"
	"os"
)

// serve answers each line with the host's name. SIGTERM ends it at once, with all connections.
func serve(address string) error {
	l, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	name, err := os.Hostname()
	if err != nil {
		return err
	}
	for {
		conn, err := l.Accept()
		if err != nil {
			return err
		}
		go func() {
			defer conn.Close()
			for lines := bufio.NewScanner(conn); lines.Scan(); {
				if _, err := conn.Write([]byte(name + "\n")); err != nil {
					return
				}
			}
		}()
	}
}
