package node

import (
	"fmt"
	"os"
	"testing"

	"github.com/verdict-proxy/verdict/internal/lab/labtest"
)

func TestMain(m *testing.M) {
	if os.Getenv(beToy) != "" {
		if err := runToy(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	labtest.Main(m)
}
