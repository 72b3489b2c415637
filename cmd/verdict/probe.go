package main

import (
	"encoding/json"
	"time"

	"github.com/spf13/cobra"

	"github.com/verdict-proxy/verdict/internal/answers/probe"
)

// newProbe makes what runs in the pods of "kubectl verdict test".
func newProbe() *cobra.Command {
	cmd := &cobra.Command{Use: "probe", Short: "Serve and dial, for kubectl verdict test", Hidden: true}
	onlyCommands(cmd)
	var name string
	var port uint16
	serve := &cobra.Command{
		Use:   "serve",
		Short: "Answer with a name to TCP and UDP; without a port, only wait",
		Args:  noArgs(""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if port == 0 {
				<-cmd.Context().Done()
				return nil
			}
			return probe.Serve(cmd.Context(), name, port)
		},
	}
	serve.Flags().StringVar(&name, "name", "", "what to answer")
	serve.Flags().Uint16Var(&port, "port", 0, "where to answer")
	var timeout time.Duration
	dial := &cobra.Command{
		Use:   "dial",
		Short: "Dial what a JSON list on standard input says, and print the answers as one",
		Args:  noArgs(""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			var list []probe.Dial
			if err := json.NewDecoder(cmd.InOrStdin()).Decode(&list); err != nil {
				return err
			}
			return json.NewEncoder(cmd.OutOrStdout()).Encode(probe.All(cmd.Context(), list, timeout))
		},
	}
	dial.Flags().DurationVar(&timeout, "timeout", 3*time.Second, "how long a connection may take")
	cmd.AddCommand(serve, dial)
	return cmd
}
