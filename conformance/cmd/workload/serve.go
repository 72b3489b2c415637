package main

import (
	"bufio"
	"net"
	"os"
)

// serve answers each line of a connection, and each datagram, with the host's name and the address from which it came.
// SIGTERM ends it at once, with all connections.
func serve(address string) error {
	name, err := os.Hostname()
	if err != nil {
		return err
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		return err
	}
	datagrams, err := net.ListenPacket("udp", address)
	if err != nil {
		return err
	}
	ended := make(chan error, 2)
	go func() { ended <- answerDatagrams(datagrams, name) }()
	go func() { ended <- answerLines(l, name) }()
	return <-ended
}

func answerLines(l net.Listener, name string) error {
	for {
		conn, err := l.Accept()
		if err != nil {
			return err
		}
		go func() {
			defer conn.Close()
			answer := reply(name, conn.RemoteAddr())
			for lines := bufio.NewScanner(conn); lines.Scan(); {
				if _, err := conn.Write(answer); err != nil {
					return
				}
			}
		}()
	}
}

func answerDatagrams(conn net.PacketConn, name string) error {
	for buffer := make([]byte, 1500); ; {
		_, from, err := conn.ReadFrom(buffer)
		if err != nil {
			return err
		}
		_, _ = conn.WriteTo(reply(name, from), from) // who gets no answer asks again, or counts it
	}
}

func reply(name string, from net.Addr) []byte {
	host, _, _ := net.SplitHostPort(from.String())
	return []byte(name + " " + host + "\n")
}
