// Command cluster is upstream Kubernetes with one node, for the tests.
//
// `cluster serve` starts everything in namespaces of its own (processes, mounts, network) and ends it together:
//
//   - main.go: the sub-commands. components.go: etcd and Kubernetes' own programs, each a sub-command of this one.
//   - serve.go: outside the namespaces; makes them, and the network link into them. inside.go: the first process inside.
//   - node.go: which components are started in which order, and how each is configured.
//   - certificates.go: the certificate authority, certificates and kubeconfigs. kinds.go: custom resource definitions.
//   - images.go: makes images of root file systems and imports them.
//
// containerd, runc, CNI plugins, iptables and iproute2 are the system's.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
)

const usage = `usage:
  cluster serve --state DIR --pause PROGRAM --kinds DIR --sandbox-controller PROGRAM
                                    run a cluster in the foreground, until SIGTERM
  cluster import --state DIR --name NAME ROOT.tar
                                    make an image of a root file system and import it
  cluster kubectl ARGUMENTS         Kubernetes' command line`

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, usage)
		os.Exit(2)
	}
	name, args := os.Args[1], os.Args[2:]
	if component, ok := components[name]; ok {
		os.Exit(component(args))
	}
	if err := runCommand(name, args); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

// Options are what `serve` was told; it passes them on to the processes inside.
type Options struct {
	// State is the folder of everything the cluster writes.
	State string
	// Pause is a static program that sleeps; the pause image is made of it.
	Pause string
	// Kinds is the folder of agent-sandbox's custom resource definitions.
	Kinds string
	// SandboxController is agent-sandbox's controller.
	SandboxController string
}

func runCommand(name string, args []string) error {
	var options Options
	flags := flag.NewFlagSet(name, flag.ExitOnError)
	flags.StringVar(&options.State, "state", "target/cluster", "folder of everything the cluster writes")
	flags.StringVar(&options.Pause, "pause", "", "static program for the pause image")
	flags.StringVar(&options.Kinds, "kinds", "", "folder of custom resource definitions")
	flags.StringVar(&options.SandboxController, "sandbox-controller", "", "program of agent-sandbox's controller")
	image := flags.String("name", "oubliette-test:latest", "name of the imported image")
	if err := flags.Parse(args); err != nil {
		return err
	}
	for _, path := range []*string{&options.State, &options.Pause, &options.Kinds, &options.SandboxController} {
		if *path == "" {
			continue
		}
		absolute, err := filepath.Abs(*path)
		if err != nil {
			return err
		}
		*path = absolute
	}
	switch name {
	case "serve":
		return serve(options)
	case "inside":
		return runInside(options)
	case "node":
		return runNode(options)
	case "import":
		if flags.NArg() != 1 {
			return errors.New("name one archive of a root file system")
		}
		return importRoot(options.State, *image, flags.Arg(0))
	default:
		return fmt.Errorf("there is no command %q\n%s", name, usage)
	}
}

// arguments gives the options back as flags.
func (o Options) arguments() []string {
	return []string{
		"--state", o.State, "--pause", o.Pause, "--kinds", o.Kinds, "--sandbox-controller", o.SandboxController,
	}
}
