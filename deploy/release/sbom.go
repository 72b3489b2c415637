package main

import (
	"bytes"
	"debug/buildinfo"
	"os"
	"strings"
	"time"

	cdx "github.com/CycloneDX/cyclonedx-go"
)

// components writes for each program which modules it is made of, as CycloneDX, from what the go command put into it.
func (r *release) components() error {
	for _, arch := range arches {
		info, err := buildinfo.ReadFile(r.binary(arch))
		if err != nil {
			return err
		}
		bom := cdx.NewBOM()
		program := component(cdx.ComponentTypeApplication, info.Main.Path, r.version)
		bom.Metadata = &cdx.Metadata{Timestamp: r.date.Format(time.RFC3339), Component: &program}
		parts := []cdx.Component{component(cdx.ComponentTypeLibrary, "std", strings.TrimPrefix(info.GoVersion, "go"))}
		for _, module := range info.Deps {
			if module.Replace != nil {
				module = module.Replace
			}
			parts = append(parts, component(cdx.ComponentTypeLibrary, module.Path, module.Version))
		}
		bom.Components = &parts
		var out bytes.Buffer
		if err := cdx.NewBOMEncoder(&out, cdx.BOMFileFormatJSON).SetPretty(true).Encode(bom); err != nil {
			return err
		}
		if err := os.WriteFile(r.binary(arch)+".cdx.json", out.Bytes(), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// component returns a Go module at a version.
func component(kind cdx.ComponentType, path, version string) cdx.Component {
	url := "pkg:golang/" + path + "@" + version
	return cdx.Component{Type: kind, BOMRef: url, Name: path, Version: version, PackageURL: url}
}
