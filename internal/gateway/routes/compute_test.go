package routes

import (
	"encoding/json"
	"testing"
)

// TestCompute shows all that follows from one Gateway.
func TestCompute(t *testing.T) {
	c := readCluster(t, gatewayDB)
	p := c.compute()
	text, _ := json.MarshalIndent(p, "", " ")
	t.Log(string(text))
}
