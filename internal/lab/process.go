package lab

import "syscall"

// StartTied starts the program like Start and ties it to the host: it is killed when the host is closed and when this
// process ends, however that ends. It leads a process group of its own, so a signal from a terminal does not reach it.
func (c *Cmd) StartTied() error {
	if c.SysProcAttr == nil {
		c.SysProcAttr = &syscall.SysProcAttr{}
	}
	c.SysProcAttr.Pdeathsig = syscall.SIGKILL
	c.SysProcAttr.Setpgid = true
	// The death signal comes when the thread ends that made the child: the host's own thread lives as long as the host.
	var err error
	if e := c.host.onThread(func() { err = c.Cmd.Start() }); e != nil {
		return e
	}
	return err
}
