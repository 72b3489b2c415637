package xtables

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"github.com/verdict-proxy/verdict/internal/system/ipfamily"
	"github.com/verdict-proxy/verdict/nft/iptshim"
)

// SaveText gives the tables in which we have chains as iptables-save prints them, and others with them: the nft variant
// reads all chains of all tables for every call, so there is one. Only if that fails, as it does for rules whose
// extension is not on this host, each table of ours is read alone.
func (p *Programs) SaveText(ctx context.Context, f ipfamily.Family) ([]byte, error) {
	if err := p.missing[f]; err != nil {
		return nil, err
	}
	all, err := p.save(ctx, f, iptshim.Tables[:])
	if err == nil || ctx.Err() != nil {
		return all, err
	}
	for _, t := range iptshim.Tables {
		text, err := p.Save(ctx, f, string(t), false)
		if err != nil {
			return nil, err
		}
		all = append(all, text...)
	}
	return all, nil
}

// SaveAll reads the tables in which we have chains.
func (p *Programs) SaveAll(ctx context.Context, f ipfamily.Family) (*iptshim.Saved, error) {
	all, err := p.SaveText(ctx, f)
	if err != nil {
		return nil, err
	}
	saved, err := iptshim.Parse(all)
	if err != nil {
		return nil, fmt.Errorf("%s %s-save: %w", f, program(f), err)
	}
	return saved, nil
}

// remove takes everything out that has our names.
func (p *Programs) remove(ctx context.Context) error {
	var errs []error
	for _, f := range ipfamily.All {
		if p.Serves(f) {
			_, err := p.removeOf(ctx, f)
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// removeTries is how often what is to be removed is read again, since others may write at the same time.
const removeTries = 3

func (p *Programs) removeOf(ctx context.Context, f ipfamily.Family) (removed bool, err error) {
	for range removeTries {
		var saved *iptshim.Saved
		if saved, err = p.SaveAll(ctx, f); err != nil {
			return false, err
		}
		text := iptshim.RemovalText(saved)
		if len(text) == 0 {
			return false, nil
		}
		if err = p.Restore(ctx, f, text); err == nil {
			return true, nil
		}
	}
	return false, err
}

// ownChain is a chain that Verdict makes and no kube-proxy.
const ownChain = "KUBE-CLUSTER-IPS"

// Wrote says whether Verdict has written rules of a family, and not only a kube-proxy.
func (p *Programs) Wrote(ctx context.Context, f ipfamily.Family) (bool, error) {
	return p.HasChain(ctx, f, string(iptshim.Filter), ownChain)
}

// RemoveOwn removes what Verdict wrote with iptables in the network namespace of the calling thread, in both variants,
// and says what it was, a line each; none if there was nothing. The rules of a kube-proxy are left alone, which have
// the same names: a chain that is only Verdict's tells them apart. The chains that Compat keeps go, too, unless they
// are to be kept. That there are no programs is no error.
func RemoveOwn(ctx context.Context, keepCompat bool, log *slog.Logger) (removed []string, err error) {
	r, err := newRunner()
	if err != nil {
		return nil, err
	}
	defer r.close()
	found, err := installed(ctx, r)
	if err != nil {
		return nil, nil // then it was not this image that wrote something
	}
	var errs []error
	for _, v := range variants {
		p := found.programs(v, r)
		for _, f := range ipfamily.All {
			if ours, err := p.Wrote(ctx, f); err != nil || !ours {
				continue // the kernel has not got this variant, or nothing is ours
			}
			done, err := p.removeOf(ctx, f)
			if errs = append(errs, err); done {
				removed = append(removed, fmt.Sprintf("iptables rules (%s variant, %s)", v, f))
			}
		}
		if !keepCompat {
			compat := Compat{Programs: p, Log: log}
			errs = append(errs, compat.Remove(ctx))
		}
	}
	return removed, errors.Join(errs...)
}
