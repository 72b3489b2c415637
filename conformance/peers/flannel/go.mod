// flannel to run beside Verdict, in a module of its own: the product depends on none of this.
module github.com/verdict-proxy/verdict/conformance/peers/flannel

go 1.26.0

require github.com/flannel-io/flannel v0.28.10 // indirect
