package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/verdict-proxy/verdict/internal/proxy/config"
	"github.com/verdict-proxy/verdict/internal/system/nearest"
	"github.com/verdict-proxy/verdict/internal/system/terminal"
)

// Help is as wide as the terminal, within these bounds: below, nothing can be laid out, and above, no eye finds the
// next line.
const leastHelp, mostHelp = 40, 100

// helpWidth is the number of columns that help takes at most.
func helpWidth(w io.Writer) int {
	return max(leastHelp, min(mostHelp, cmp.Or(terminal.Width(w), terminal.DefaultWidth)))
}

// flagUsages returns the flags of a command as help shows them: its own first, then those of config.FlagGroups.
func flagUsages(fs *pflag.FlagSet, width int) string {
	var out strings.Builder
	for i, name := range append([]string{"Flags"}, config.FlagGroups...) {
		heading := "\n" + name + ":\n"
		fs.VisitAll(func(f *pflag.Flag) {
			group := f.Annotations[config.GroupAnnotation]
			if f.Hidden || (len(group) == 0) != (i == 0) || i > 0 && group[0] != name {
				return
			}
			out.WriteString(heading + flagUsage(f, width))
			heading = ""
		})
	}
	return out.String()
}

// flagUsage returns a flag in one line, or in two or more if it is long. Unlike pflag, it does not indent all flags as
// far as the longest name asks for, so that lines stay short.
func flagUsage(f *pflag.Flag, width int) string {
	column := min(36, width/2-4)
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
	line := terminal.Columns{column}.Row(head, usage)
	if len(head) >= column {
		line = strings.Repeat(" ", column) + usage
		head += "\n"
	} else {
		head = ""
	}
	return head + terminal.Wrap(line, width, column) + "\n"
}

// setHelp gives a command and those below it help that fits the terminal, with groups of flags.
func setHelp(root *cobra.Command) {
	root.SetUsageFunc(func(cmd *cobra.Command) error {
		_, err := io.WriteString(cmd.OutOrStderr(), usage(cmd, helpWidth(cmd.OutOrStderr())))
		return err
	})
	root.SetHelpFunc(func(cmd *cobra.Command, _ []string) {
		out := cmd.OutOrStdout()
		width := helpWidth(out)
		fmt.Fprint(out, reflow(cmp.Or(cmd.Long, cmd.Short), width)+"\n"+usage(cmd, width))
	})
	root.SetFlagErrorFunc(flagError)
	onlyCommands(root)
	root.InitDefaultHelpCmd()
	for _, c := range root.Commands() {
		if c.Name() == "help" {
			c.Long = "Help shows the help of a command, as --help does."
			c.Run, c.RunE = nil, helpOn
		}
	}
}

// helpOn shows the help of the command that the arguments name. That there is none is an error.
func helpOn(help *cobra.Command, args []string) error {
	cmd, rest, err := help.Root().Find(args)
	if err == nil && len(rest) > 0 {
		err = noSuchCommand(cmd, rest[0])
	}
	if err != nil {
		return err
	}
	cmd.InitDefaultHelpFlag()
	return cmd.Help()
}

// usage is what help says below the description.
func usage(cmd *cobra.Command, width int) string {
	var b strings.Builder
	b.WriteString("Usage:\n")
	if cmd.Runnable() {
		b.WriteString(terminal.Wrap("  "+cmd.UseLine(), width, 4) + "\n")
	}
	if cmd.HasAvailableSubCommands() {
		b.WriteString("  " + cmd.CommandPath() + " [command]\n")
	}
	if cmd.HasExample() {
		b.WriteString("\nExamples:\n" + wrapCommands(cmd.Example, width))
	}
	if cmd.HasAvailableSubCommands() {
		b.WriteString("\nCommands:\n")
		for _, c := range cmd.Commands() {
			if c.IsAvailableCommand() || c.Name() == "help" {
				line := fmt.Sprintf("  %-*s %s", c.NamePadding(), c.Name(), c.Short)
				b.WriteString(terminal.Wrap(line, width, c.NamePadding()+3) + "\n")
			}
		}
	}
	b.WriteString(flagUsages(cmd.LocalFlags(), width))
	if cmd.HasAvailableInheritedFlags() {
		b.WriteString(strings.Replace(flagUsages(cmd.InheritedFlags(), width), "Flags:", "Flags of all commands:", 1))
	}
	if cmd.HasAvailableSubCommands() {
		b.WriteString("\n" + terminal.Wrap(fmt.Sprintf("Use %q for more about a command.",
			cmd.CommandPath()+" [command] --help"), width, 0) + "\n")
	}
	return b.String()
}

// wrapCommands breaks long commands as a shell reads them.
func wrapCommands(text string, width int) string {
	var b strings.Builder
	for line := range strings.Lines(strings.ReplaceAll(text, " \\\n", "\n")) {
		wrapped := terminal.Wrap(strings.TrimRight(line, "\n"), width-2, 4)
		b.WriteString(strings.ReplaceAll(wrapped, "\n", " \\\n") + "\n")
	}
	return b.String()
}

// reflow fits a description to a width: paragraphs, and rows of tables, which are indented, and whose second cells
// continue below themselves.
func reflow(text string, width int) string {
	var b strings.Builder
	line, hang := "", 0
	flush := func() {
		if line != "" {
			b.WriteString(terminal.Wrap(line, width, hang) + "\n")
		}
		line = ""
	}
	for next := range strings.Lines(text) {
		next = strings.TrimRight(next, "\n")
		words := strings.TrimLeft(next, " ")
		indent := len(next) - len(words)
		if line != "" && words != "" && indent == hang {
			line += " " + words
			continue
		}
		flush()
		if words == "" {
			b.WriteString("\n")
			continue
		}
		line, hang = next, indent
		if gap := strings.Index(words, "  "); indent > 0 && gap > 0 {
			hang = len(next) - len(strings.TrimLeft(words[gap:], " "))
		}
	}
	flush()
	return b.String()
}

// noArgs refuses arguments; hint says what the user may have meant.
func noArgs(hint string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) == 0 {
			return nil
		}
		return fmt.Errorf("%s takes no arguments, but got %q%s", cmd.CommandPath(), args[0], hint)
	}
}

// flagError says which flag was meant, if one is unknown.
func flagError(cmd *cobra.Command, err error) error {
	if cmd.HasSubCommands() && cmd.Flags().NArg() > 0 { // whose flags it may be, nobody knows
		return noSuchCommand(cmd, cmd.Flags().Arg(0))
	}
	var unknown *pflag.NotExistError
	if !errors.As(err, &unknown) || unknown.GetSpecifiedShortnames() != "" {
		return err
	}
	var names []string
	begins := ""
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		if f.Hidden {
			return
		}
		names = append(names, f.Name)
		if strings.HasPrefix(f.Name, unknown.GetSpecifiedName()) {
			begins = f.Name
		}
	})
	if like := cmp.Or(nearest.Of(unknown.GetSpecifiedName(), names), begins); like != "" {
		return fmt.Errorf("%w (did you mean --%s?)", err, like)
	}
	return fmt.Errorf("%w; %s --help lists those of this command", err, cmd.CommandPath())
}

// addJSON adds --json, and -o json, which means the same.
func addJSON(fs *pflag.FlagSet, on *bool, usage string) {
	fs.BoolVar(on, "json", false, usage)
	fs.VarPF(outputFormat{json: on}, "output", "o", "text or json; json is the same as --json")
}

// outputFormat is the value of -o. Wide is nil where there is no such format.
type outputFormat struct{ json, wide *bool }

// String is for pflag.
func (o outputFormat) String() string {
	switch {
	case o.json != nil && *o.json:
		return "json"
	case o.wide != nil && *o.wide:
		return "wide"
	}
	return "text"
}

// Type is for pflag.
func (o outputFormat) Type() string {
	if o.wide != nil {
		return "text|json|wide"
	}
	return "text|json"
}

// Set is for pflag.
func (o outputFormat) Set(text string) error {
	switch {
	case o.wide != nil && text == "wide":
		*o.wide, *o.json = true, false
		return nil
	case text == "json" || text == "text":
		*o.json = text == "json"
		return nil
	}
	return fmt.Errorf("%q is neither %s", text, strings.ReplaceAll(o.Type(), "|", " nor "))
}

// onlyCommands makes a command one that only holds others: one that does not exist is an error.
func onlyCommands(cmd *cobra.Command) {
	cmd.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
	cmd.Args = func(cmd *cobra.Command, args []string) error {
		if len(args) > 0 {
			return noSuchCommand(cmd, args[0])
		}
		return nil
	}
}

// noSuchCommand is the error of a command that has none of a name below it.
func noSuchCommand(cmd *cobra.Command, name string) error {
	message := fmt.Sprintf("%q has no command %q", cmd.CommandPath(), name)
	cmd.SuggestionsMinimumDistance = 2
	if near := cmd.SuggestionsFor(name); len(near) > 0 {
		message += ": did you mean " + strings.Join(near, " or ") + "?"
	}
	return errors.New(message)
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
