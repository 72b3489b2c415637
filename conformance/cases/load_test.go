package cases

import "testing"

func TestEmbedded(t *testing.T) {
	s, err := Load()
	if err != nil {
		t.Fatal(err)
	}
	looks := 0
	for _, c := range s.Cases {
		looks += len(c.Looks)
	}
	t.Logf("%d cases with %d looks, %d stories", len(s.Cases), looks, len(s.Stories))
}
