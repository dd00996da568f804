package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
)

// The cluster's addresses. The host has the first address of the link and routes to pods and services through the node's.
const (
	hostLink       = "oubcluster0"
	hostAddress    = "10.213.0.1"
	nodeAddress    = "10.213.0.2"
	linkPrefix     = "/24"
	podRange       = "10.213.1.0/24"
	serviceRange   = "10.213.2.0/24"
	serviceAddress = "10.213.2.1"
	etcdAddress    = "127.0.0.1:2379"
	apiPort        = "6443"
	nodeName       = "oubliette-test"
	// cgroupName is the cgroup, in each hierarchy, below which the kubelet puts those of pods.
	cgroupName = "oubliette-test-cluster"
)

// neededPrograms are the system's programs and the Debian packages they come in.
var neededPrograms = [][2]string{
	{"containerd", "containerd"}, {"ctr", "containerd"}, {"runc", "runc"}, {"iptables", "iptables"}, {"ip", "iproute2"},
	{"nsenter", "util-linux"}, {"mount", "mount"},
}

const pluginFolder = "/usr/lib/cni"

// privateFolders are fixed paths that the kubelet and CNI write to. Inside, a folder of the state is mounted over each.
var privateFolders = []string{"/var/lib/kubelet", "/var/lib/cni", "/var/log/pods", "/var/log/containers"}

// changedSettings are settings of the kernel that the kubelet changes for the whole machine.
var changedSettings = []string{
	"/proc/sys/vm/overcommit_memory", "/proc/sys/vm/panic_on_oom", "/proc/sys/kernel/panic",
	"/proc/sys/kernel/panic_on_oops", "/proc/sys/kernel/keys/root_maxkeys", "/proc/sys/kernel/keys/root_maxbytes",
}

// serve runs a cluster until it is told to end, and removes what would be left of it.
func serve(options Options) error {
	if err := checkMachine(); err != nil {
		return err
	}
	release, err := prepareState(options.State)
	if err != nil {
		return err
	}
	defer release()
	for _, folder := range privateFolders {
		if _, err := os.Stat(folder); os.IsNotExist(err) {
			if err := os.MkdirAll(folder, 0o755); err != nil {
				return err
			}
			// Fails, as it should, if something else has put files there by then.
			defer os.Remove(folder)
		}
	}
	for _, file := range changedSettings {
		if before, err := os.ReadFile(file); err == nil {
			defer os.WriteFile(file, before, 0o644)
		}
	}
	cgroups, err := makeCgroups()
	defer removeCgroups(cgroups)
	if err != nil {
		return err
	}
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)

	// The signal that ends the inside when this process dies is sent when the thread that started it ends.
	runtime.LockOSThread()
	linked, link, err := os.Pipe()
	if err != nil {
		return err
	}
	inside := exec.Command("/proc/self/exe", append([]string{"inside"}, options.arguments()...)...)
	inside.Stdout, inside.Stderr = os.Stdout, os.Stderr
	inside.ExtraFiles = []*os.File{linked}
	inside.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWNS | syscall.CLONE_NEWNET,
		Pdeathsig:  syscall.SIGKILL,
	}
	if err := inside.Start(); err != nil {
		return fmt.Errorf("cannot make namespaces: %w", err)
	}
	pid := strconv.Itoa(inside.Process.Pid)
	exited := make(chan error, 1)
	go func() { exited <- inside.Wait() }()
	err = writeState(options.State, "inside.pid", pid)
	if err == nil {
		err = makeLink(pid)
	}
	if err == nil {
		_, err = link.Write([]byte{1})
	}
	if err == nil {
		select {
		case <-ended:
		case err := <-exited:
			return fmt.Errorf("the cluster ended by itself (%v); its logs are in %s/logs", err, options.State)
		}
	}
	// The first process of a process namespace takes all others with it, and is gone only when they are.
	_ = inside.Process.Kill()
	<-exited
	return err
}

// checkMachine says what is missing here.
func checkMachine() error {
	if os.Geteuid() != 0 {
		return errors.New("a cluster is started by root only: it makes namespaces, cgroups and mounts")
	}
	var missing []string
	for _, needed := range neededPrograms {
		if _, err := exec.LookPath(needed[0]); err != nil {
			missing = append(missing, needed[1])
		}
	}
	if _, err := os.Stat(filepath.Join(pluginFolder, "bridge")); err != nil {
		missing = append(missing, "containernetworking-plugins")
	}
	if missing != nil {
		return fmt.Errorf("these packages are missing: %s", strings.Join(missing, " "))
	}
	return nil
}

// prepareState empties the folder of the state, which belongs to this process until it calls the returned function.
func prepareState(state string) (func(), error) {
	if err := os.MkdirAll(state, 0o755); err != nil {
		return nil, err
	}
	lock, err := os.OpenFile(filepath.Join(state, "lock"), os.O_CREATE|os.O_RDWR|syscall.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return nil, fmt.Errorf("a cluster runs in %s already", state)
	}
	remove := func() {
		for _, name := range []string{
			"ready", "pid", "inside.pid", "kubeconfig", "etcd", "containerd", "private", "certificates", "config", "images",
		} {
			_ = os.RemoveAll(filepath.Join(state, name))
		}
	}
	remove()
	if err := os.RemoveAll(filepath.Join(state, "logs")); err != nil {
		return nil, err
	}
	for _, name := range []string{"logs", "certificates", "config", "images", "private"} {
		if err := os.MkdirAll(filepath.Join(state, name), 0o755); err != nil {
			return nil, err
		}
	}
	if err := writeState(state, "pid", strconv.Itoa(os.Getpid())); err != nil {
		return nil, err
	}
	return func() {
		remove()
		_ = lock.Close()
	}, nil
}

// writeState writes a file of the state so that it is there as a whole or not at all.
func writeState(state, name, text string) error {
	path := filepath.Join(state, name)
	if err := os.WriteFile(path+".new", []byte(text), 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// makeLink connects the network namespace of a process with the host's. It goes when that namespace does.
func makeLink(pid string) error {
	for _, line := range []string{
		"link add " + hostLink + " type veth peer name eth0 netns " + pid,
		"address add " + hostAddress + linkPrefix + " dev " + hostLink,
		"link set " + hostLink + " up",
		"route add " + podRange + " via " + nodeAddress,
		"route add " + serviceRange + " via " + nodeAddress,
	} {
		output, err := exec.Command("ip", strings.Fields(line)...).CombinedOutput()
		if err != nil {
			hint := ""
			if strings.Contains(string(output), "File exists") {
				hint = "; one such cluster can run on a machine at a time: end the other, or use it with KUBECONFIG"
			}
			return fmt.Errorf("ip %s: %s%s", line, strings.TrimSpace(string(output)), hint)
		}
	}
	return nil
}

// makeCgroups makes the cgroup in which pods are, in each hierarchy, and returns the folders.
func makeCgroups() ([]string, error) {
	const top = "/sys/fs/cgroup"
	hierarchies := []string{top}
	if _, err := os.Stat(top + "/cgroup.controllers"); err != nil {
		entries, err := os.ReadDir(top)
		if err != nil {
			return nil, err
		}
		hierarchies = nil
		for _, entry := range entries {
			// Not the names that point to another, such as cpu for cpu,cpuacct.
			if entry.IsDir() && entry.Name() != "unified" {
				hierarchies = append(hierarchies, filepath.Join(top, entry.Name()))
			}
		}
	}
	// runc makes its own beside those of version 1, which are removed with the rest.
	made := []string{filepath.Join(top, "unified", cgroupName)}
	for _, hierarchy := range hierarchies {
		folder := filepath.Join(hierarchy, cgroupName)
		if err := os.Mkdir(folder, 0o755); err != nil && !os.IsExist(err) {
			return made, fmt.Errorf("cannot make a cgroup: %w", err)
		}
		made = append(made, folder)
		// A new cpuset of version 1 has no processors and no memory, and takes no process then.
		for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
			if value, err := os.ReadFile(filepath.Join(hierarchy, file)); err == nil {
				_ = os.WriteFile(filepath.Join(folder, file), value, 0o644)
			}
		}
	}
	return made, nil
}

// removeCgroups removes cgroups and those in them; no process is left in them.
func removeCgroups(folders []string) {
	for _, folder := range folders {
		var inner []string
		_ = filepath.WalkDir(folder, func(path string, entry os.DirEntry, err error) error {
			if err == nil && entry.IsDir() {
				inner = append(inner, path)
			}
			return nil
		})
		for i := len(inner) - 1; i >= 0; i-- {
			_ = syscall.Rmdir(inner[i])
		}
	}
}
