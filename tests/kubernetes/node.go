package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	core "k8s.io/api/core/v1"
	"k8s.io/apiextensions-apiserver/pkg/client/clientset/clientset"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
)

// startTimeout bounds each wait while the cluster starts. Generous: machines that run tests are busy.
const startTimeout = 5 * time.Minute

// Node starts the components and notices when one ends.
type Node struct {
	Options
	ended chan error
}

// runNode starts everything in order, says that the cluster is ready and waits until a component ends.
func runNode(options Options) error {
	node := &Node{Options: options, ended: make(chan error, 1)}
	started := make(chan error, 1)
	go func() { started <- node.start(context.Background()) }()
	for {
		select {
		case err := <-node.ended:
			return err
		case err := <-started:
			if err != nil {
				return err
			}
			fmt.Println("ready")
			if err := writeState(options.State, "ready", options.State+"/kubeconfig\n"); err != nil {
				return err
			}
			started = nil
		}
	}
}

func (n *Node) start(ctx context.Context) error {
	if err := issueAll(n.State); err != nil {
		return err
	}
	if err := n.writeConfigs(); err != nil {
		return err
	}
	n.run("etcd", n.path("etcd"))
	n.runProgram("containerd", "containerd", "--config", n.config("containerd.toml"))
	if err := waitFor(ctx, "etcd", func() error { return canConnect("tcp", etcdAddress) }); err != nil {
		return err
	}
	n.run("kube-apiserver", n.apiServerArguments()...)
	config, err := clientcmd.BuildConfigFromFlags("", n.path("kubeconfig"))
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	err = waitFor(ctx, "the API server", func() error {
		return client.RESTClient().Get().AbsPath("/readyz").Do(ctx).Error()
	})
	if err != nil {
		return err
	}
	n.run("kube-controller-manager", n.controllerManagerArguments()...)
	n.run("kube-scheduler", "--kubeconfig", n.config("kube-scheduler.kubeconfig"),
		"--authentication-kubeconfig", n.config("kube-scheduler.kubeconfig"),
		"--authorization-kubeconfig", n.config("kube-scheduler.kubeconfig"),
		"--leader-elect=false", "--bind-address=127.0.0.1")
	if err := waitFor(ctx, "containerd", func() error { return canConnect("unix", containerdSocket) }); err != nil {
		return err
	}
	// The kubelet asks for the pause image as soon as it gets a pod.
	if err := importPause(n.State, n.Pause); err != nil {
		return err
	}
	n.run("kubelet", "--config", n.config("kubelet.yaml"), "--kubeconfig", n.config("kubelet.kubeconfig"),
		"--hostname-override", nodeName, "--node-ip", nodeAddress)
	n.run("kube-proxy", "--config", n.config("kube-proxy.yaml"))
	if n.Kinds != "" {
		extensions, err := clientset.NewForConfig(config)
		if err != nil {
			return err
		}
		if err := createKinds(ctx, extensions, n.Kinds); err != nil {
			return err
		}
	}
	if n.SandboxController != "" {
		n.runProgram("agent-sandbox-controller", n.SandboxController, "--kubeconfig", n.path("kubeconfig"),
			"--extensions", "--leader-elect=false", "--enable-webhook=false",
			"--metrics-bind-address=127.0.0.1:9101", "--health-probe-bind-address=127.0.0.1:9102")
	}
	return waitFor(ctx, "the node", func() error { return checkNode(ctx, client) })
}

// checkNode says whether the node takes pods, and whether pods of the default namespace would be admitted.
func checkNode(ctx context.Context, client kubernetes.Interface) error {
	node, err := client.CoreV1().Nodes().Get(ctx, nodeName, meta.GetOptions{})
	if err != nil {
		return err
	}
	for _, condition := range node.Status.Conditions {
		if condition.Type == core.NodeReady && condition.Status != core.ConditionTrue {
			return fmt.Errorf("%s: %s", condition.Reason, condition.Message)
		}
	}
	if len(node.Status.Conditions) == 0 || len(node.Spec.Taints) != 0 {
		return fmt.Errorf("not ready yet, taints %v", node.Spec.Taints)
	}
	_, err = client.CoreV1().ServiceAccounts("default").Get(ctx, "default", meta.GetOptions{})
	return err
}

func (n *Node) path(name string) string   { return filepath.Join(n.State, name) }
func (n *Node) config(name string) string { return filepath.Join(n.State, "config", name) }
func (n *Node) certificate(name string) string {
	return filepath.Join(n.State, "certificates", name)
}

// run starts a component of this program.
func (n *Node) run(name string, args ...string) {
	n.runProgram(name, "/proc/self/exe", append([]string{name}, args...)...)
}

// runProgram starts a program with its output in a log. When it ends, so does the node.
func (n *Node) runProgram(name, program string, args ...string) {
	err := func() error {
		path := filepath.Join(n.State, "logs", name+".log")
		log, err := os.Create(path)
		if err != nil {
			return err
		}
		defer log.Close()
		process := exec.Command(program, args...)
		process.Stdout, process.Stderr = log, log
		if err := process.Start(); err != nil {
			return err
		}
		go func() {
			err := process.Wait()
			n.report(fmt.Errorf("%s ended (%v), after:\n%s", name, err, endOfFile(path)))
		}()
		return nil
	}()
	if err != nil {
		n.report(fmt.Errorf("%s does not start: %w", name, err))
	}
}

// report notes why the node ends; the first reason counts.
func (n *Node) report(err error) {
	select {
	case n.ended <- err:
	default:
	}
}

func endOfFile(path string) string {
	text, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	return strings.Join(lines[max(0, len(lines)-15):], "\n")
}

func canConnect(network, address string) error {
	connection, err := net.DialTimeout(network, address, time.Second)
	if err != nil {
		return err
	}
	return connection.Close()
}

// waitFor asks until there is no error, or for too long.
func waitFor(ctx context.Context, what string, check func() error) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	begin := time.Now()
	for {
		err := check()
		if err == nil {
			fmt.Printf("%s: ready after %.1f s\n", what, time.Since(begin).Seconds())
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s is not ready after %s: %w", what, startTimeout, err)
		case <-time.After(200 * time.Millisecond):
		}
	}
}
