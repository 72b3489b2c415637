package main

import (
	"fmt"
	"io"
	"net/http"
	"os"
)

// get asks a URL, in which variables of the environment are replaced, and prints the answer: a hook without a shell.
func get(url string) error {
	answer, err := http.Get(os.ExpandEnv(url))
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	if _, err := io.Copy(os.Stdout, answer.Body); err != nil {
		return err
	}
	if answer.StatusCode != http.StatusOK {
		return fmt.Errorf("%s says %s", url, answer.Status)
	}
	return nil
}
