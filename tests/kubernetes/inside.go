package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
)

// runInside is the first process of the namespaces: it mounts, sets the network up, starts the node and then only reaps.
func runInside(options Options) error {
	if os.Getpid() != 1 {
		return errors.New("`inside` is run by `serve` only")
	}
	if err := mountInside(options.State); err != nil {
		return err
	}
	// The link is made from outside, which needs the id of this process.
	linked := os.NewFile(3, "linked")
	if _, err := linked.Read(make([]byte, 1)); err != nil {
		return fmt.Errorf("no network link was made: %w", err)
	}
	linked.Close()
	if err := setUpNetwork(); err != nil {
		return err
	}
	node := exec.Command("/proc/self/exe", append([]string{"node"}, options.arguments()...)...)
	node.Stdout, node.Stderr = os.Stdout, os.Stderr
	if err := node.Start(); err != nil {
		return err
	}
	// Processes whose parent ends, such as containerd's shims, become children of this one.
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, 0, nil)
		if err == syscall.EINTR {
			continue
		}
		if err != nil {
			return err
		}
		if pid == node.Process.Pid {
			return fmt.Errorf("the node ended (status %d)", status.ExitStatus())
		}
	}
}

// mountInside hides the host's runtime files and gives the cluster its own, so that nothing stays mounted when it ends.
func mountInside(state string) error {
	// First a slave: mounts of the host arrive, those made here stay here. Then shared, as volumes of pods may be propagated.
	for _, flag := range []uintptr{syscall.MS_SLAVE, syscall.MS_SHARED} {
		if err := syscall.Mount("", "/", "", flag|syscall.MS_REC, ""); err != nil {
			return fmt.Errorf("cannot separate mounts: %w", err)
		}
	}
	if err := syscall.Mount("proc", "/proc", "proc", syscall.MS_NOSUID|syscall.MS_NODEV|syscall.MS_NOEXEC, ""); err != nil {
		return fmt.Errorf("cannot mount /proc: %w", err)
	}
	if err := syscall.Mount("tmpfs", "/run", "tmpfs", syscall.MS_NOSUID|syscall.MS_NODEV, "mode=0755"); err != nil {
		return fmt.Errorf("cannot mount /run: %w", err)
	}
	for _, folder := range privateFolders {
		own := filepath.Join(state, "private", strings.ReplaceAll(strings.Trim(folder, "/"), "/", "-"))
		if err := os.MkdirAll(own, 0o755); err != nil {
			return err
		}
		if err := syscall.Mount(own, folder, "", syscall.MS_BIND, ""); err != nil {
			return fmt.Errorf("cannot mount over %s: %w", folder, err)
		}
	}
	return nil
}

func setUpNetwork() error {
	for _, line := range []string{
		"link set lo up",
		"address add " + nodeAddress + linkPrefix + " dev eth0",
		"link set eth0 up",
		"route add default via " + hostAddress,
	} {
		if output, err := exec.Command("ip", strings.Fields(line)...).CombinedOutput(); err != nil {
			return fmt.Errorf("ip %s: %s", line, strings.TrimSpace(string(output)))
		}
	}
	if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0o644); err != nil {
		return err
	}
	// Packets from a pod to a pod of the same bridge pass the rules of services too, where the kernel has this as a module.
	_ = os.WriteFile("/proc/sys/net/bridge/bridge-nf-call-iptables", []byte("1"), 0o644)
	return nil
}
