package main

import (
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/verdict-proxy/verdict/internal/config"
)

// helpWidth is the number of columns that help takes at most.
const helpWidth = 100

// flagUsages returns the flags of a command as help shows them: its own first, then those of config.FlagGroups.
func flagUsages(fs *pflag.FlagSet) string {
	var out strings.Builder
	for i, name := range append([]string{"Flags"}, config.FlagGroups...) {
		heading := "\n" + name + ":\n"
		fs.VisitAll(func(f *pflag.Flag) {
			group := f.Annotations[config.GroupAnnotation]
			if f.Hidden || (len(group) == 0) != (i == 0) || i > 0 && group[0] != name {
				return
			}
			out.WriteString(heading + flagUsage(f))
			heading = ""
		})
	}
	return out.String()
}

// flagsBelow returns flags that a command has from those above it, under a heading.
func flagsBelow(fs *pflag.FlagSet, heading string) string {
	return strings.Replace(strings.TrimPrefix(flagUsages(fs), "\n"), "Flags:", heading+":", 1)
}

// flagUsage returns a flag in one line, or in two or more if it is long. Unlike pflag, it does not indent all flags as
// far as the longest name asks for, so that lines stay short.
func flagUsage(f *pflag.Flag) string {
	const column = 36
	kind, usage := pflag.UnquoteUsage(f)
	head := "      --" + f.Name
	if f.Shorthand != "" && f.ShorthandDeprecated == "" {
		head = "  -" + f.Shorthand + ", --" + f.Name
	}
	if kind != "" {
		head += " " + kind
	}
	if value := f.DefValue; value != "" && value != "false" && value != "0" && value != "[]" &&
		!strings.Contains(usage, "(default") {
		usage += " (default " + value + ")"
	}
	var out strings.Builder
	line := head
	if len(head) >= column {
		out.WriteString(head + "\n")
		line = ""
	}
	line += strings.Repeat(" ", column-len(line))
	empty := true
	for word := range strings.FieldsSeq(usage) {
		if !empty && len(line)+1+len(word) > helpWidth {
			out.WriteString(line + "\n")
			line, empty = strings.Repeat(" ", column), true
		}
		if !empty {
			line += " "
		}
		line += word
		empty = false
	}
	return out.String() + strings.TrimRight(line, " ") + "\n"
}

// setUsage gives a command and those below it a usage with groups of flags, no wider than helpWidth.
func setUsage(root *cobra.Command) {
	cobra.AddTemplateFunc("flagGroups", flagUsages)
	cobra.AddTemplateFunc("flagsBelow", flagsBelow)
	root.SetUsageTemplate(usageTemplate)
}

const usageTemplate = `Usage:{{if .Runnable}}
  {{.UseLine}}{{end}}{{if .HasAvailableSubCommands}}
  {{.CommandPath}} [command]{{end}}{{if .HasExample}}

Examples:
{{.Example}}{{end}}{{if .HasAvailableSubCommands}}

Commands:{{range .Commands}}{{if or .IsAvailableCommand (eq .Name "help")}}
  {{rpad .Name .NamePadding}} {{.Short}}{{end}}{{end}}{{end}}
{{flagGroups .LocalFlags}}{{if .HasAvailableInheritedFlags}}
{{"Flags of all commands" | flagsBelow .InheritedFlags}}{{end}}{{if .HasAvailableSubCommands}}
Use "{{.CommandPath}} [command] --help" for more about a command.{{end}}
`

// addJSON adds --json, and -o json, which means the same.
func addJSON(fs *pflag.FlagSet, on *bool, usage string) {
	fs.BoolVar(on, "json", false, usage)
	fs.VarPF(outputFormat{on}, "output", "o", "text or json; json is the same as --json")
}

// outputFormat is the value of -o.
type outputFormat struct{ json *bool }

// String is for pflag.
func (o outputFormat) String() string {
	if o.json != nil && *o.json {
		return "json"
	}
	return "text"
}

// Type is for pflag.
func (outputFormat) Type() string { return "text|json" }

// Set is for pflag.
func (o outputFormat) Set(text string) error {
	switch text {
	case "json", "text":
		*o.json = text == "json"
		return nil
	}
	return fmt.Errorf("%q is neither text nor json", text)
}

// needCommand is for commands that only hold others: one that does not exist is an error.
func needCommand(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return cmd.Help()
	}
	message := fmt.Sprintf("%q has no command %q", cmd.CommandPath(), args[0])
	cmd.SuggestionsMinimumDistance = 2
	if near := cmd.SuggestionsFor(args[0]); len(near) > 0 {
		message += ": did you mean " + strings.Join(near, " or ") + "?"
	}
	return fmt.Errorf("%s", message)
}

// completeWords completes the flags of a command that take one of a few words, such as auto|never.
func completeWords(cmd *cobra.Command) {
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		if kind := f.Value.Type(); strings.Contains(kind, "|") {
			words := cobra.FixedCompletions(strings.Split(kind, "|"), cobra.ShellCompDirectiveNoFileComp)
			_ = cmd.RegisterFlagCompletionFunc(f.Name, words)
		}
	})
	for _, child := range cmd.Commands() {
		completeWords(child)
	}
}
