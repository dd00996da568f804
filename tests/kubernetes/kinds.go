package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	apiextensions "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apiextensions-apiserver/pkg/client/clientset/clientset"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

// createKinds creates the custom resource definitions of a folder and waits until they are served. Only the version that is
// stored is kept: the older ones need a web hook to be converted.
func createKinds(ctx context.Context, client clientset.Interface, folder string) error {
	files, err := filepath.Glob(filepath.Join(folder, "*.yaml"))
	if err != nil || len(files) == 0 {
		return fmt.Errorf("no custom resource definitions in %s", folder)
	}
	definitions := client.ApiextensionsV1().CustomResourceDefinitions()
	var names []string
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		var definition apiextensions.CustomResourceDefinition
		if err := yaml.Unmarshal(text, &definition); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
		var stored []apiextensions.CustomResourceDefinitionVersion
		for _, version := range definition.Spec.Versions {
			if version.Storage {
				stored = append(stored, version)
			}
		}
		definition.Spec.Versions = stored
		definition.Spec.Conversion = &apiextensions.CustomResourceConversion{Strategy: apiextensions.NoneConverter}
		if _, err := definitions.Create(ctx, &definition, meta.CreateOptions{}); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
		names = append(names, definition.Name)
	}
	for _, name := range names {
		err := waitFor(ctx, "the kind "+name, func() error {
			definition, err := definitions.Get(ctx, name, meta.GetOptions{})
			if err != nil {
				return err
			}
			for _, condition := range definition.Status.Conditions {
				if condition.Type == apiextensions.Established && condition.Status == apiextensions.ConditionTrue {
					return nil
				}
			}
			return fmt.Errorf("not established")
		})
		if err != nil {
			return err
		}
	}
	return nil
}
