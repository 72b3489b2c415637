package sloppy

import "testing"

func TestParseAddr(t *testing.T) {
	for _, test := range []struct {
		text, want string
		plain      bool
	}{
		{"10.96.4.1", "10.96.4.1", true},
		{"fd00::1", "fd00::1", true},
		{"fe80::1%eth0", "fe80::1%eth0", true},
		{"fd00::10.0.0.34", "fd00::a00:22", true},
		{"10.96.04.001", "10.96.4.1", false},
		{"010.010.010.010", "10.10.10.10", false}, // decimal, not octal
		{"::ffff:10.0.0.1", "10.0.0.1", false},
		{"::ffff:010.0.0.01", "10.0.0.1", false},
		{"fd00::00001", "fd00::1", false},
		{"10.96.04", "invalid IP", false},
		{"10.96.04.256", "invalid IP", false},
		{" 10.96.4.1", "invalid IP", false},
		{"0x0a.1.1.1", "invalid IP", false},
		{"", "invalid IP", false},
	} {
		a, plain, ok := ParseAddr(test.text)
		if a.String() != test.want || plain != test.plain || ok != a.IsValid() {
			t.Errorf("%q: %v, plain %v, ok %v", test.text, a, plain, ok)
		}
	}
}

func TestParsePrefix(t *testing.T) {
	for _, test := range []struct {
		text, want string
		plain      bool
	}{
		{"10.0.0.1/8", "10.0.0.0/8", true},
		{"fd00::1/64", "fd00::/64", true},
		{"192.168.007.000/025", "192.168.7.0/25", false},
		{"192.168.7.0/025", "192.168.7.0/25", false},
		{"::ffff:10.1.0.0/104", "10.0.0.0/8", false},
		{"::ffff:10.1.0.0/96", "0.0.0.0/0", false},
		{"::ffff:10.1.0.0/90", "::ffc0:0:0/90", false},
		{"::/0", "::/0", true},
		{"10.0.0.0/33", "invalid Prefix", false},
		{"10.0.0.0", "invalid Prefix", false},
		{"fe80::%eth0/64", "invalid Prefix", false},
		{"", "invalid Prefix", false},
	} {
		p, plain, ok := ParsePrefix(test.text)
		if p.String() != test.want || plain != test.plain || ok != p.IsValid() {
			t.Errorf("%q: %v, plain %v, ok %v", test.text, p, plain, ok)
		}
	}
}
