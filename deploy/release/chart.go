package main

import (
	"path/filepath"
	"strings"

	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"helm.sh/helm/v4/pkg/chart/v2/util"
)

// chart packs the Helm chart. Its version is the release's, and so is the tag of the image that it takes.
func (r *release) chart() error {
	chart, err := loader.Load(filepath.Join(r.tree, "deploy/helm/verdict"))
	if err != nil {
		return err
	}
	chart.Metadata.Version = strings.TrimPrefix(r.version, "v")
	chart.Metadata.AppVersion = r.version
	chart.ModTime, chart.SchemaModTime = r.date, r.date
	for _, files := range [][]*common.File{chart.Raw, chart.Templates, chart.Files} {
		for _, file := range files {
			file.ModTime = r.date
		}
	}
	_, err = util.Save(chart, r.out)
	return err
}
