package main

import (
	"context"
	"fmt"
	"net/url"
	"os"
	"time"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/embed"
	_ "k8s.io/client-go/plugin/pkg/client/auth"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	kubectlutil "k8s.io/kubectl/pkg/cmd/util"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

// components are the programs this one contains: what each upstream `main` does, with the arguments after the sub-command.
// Each runs in a process of its own, as their flags, feature gates and metrics are global variables.
var components = map[string]func([]string) int{
	"etcd":                    runEtcd,
	"kube-apiserver":          command(apiserver.NewAPIServerCommand),
	"kube-controller-manager": command(controllermanager.NewControllerManagerCommand),
	"kube-scheduler":          command(func() *cobra.Command { return scheduler.NewSchedulerCommand() }),
	"kube-proxy":              command(proxy.NewProxyCommand),
	"kubelet":                 command(func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) }),
	"kubectl":                 runKubectl,
}

func command(build func() *cobra.Command) func([]string) int {
	return func(args []string) int {
		command := build()
		command.SetArgs(args)
		return cli.Run(command)
	}
}

// runKubectl runs the command line of Kubernetes, which reads its arguments where a program of its own has them.
func runKubectl(args []string) int {
	os.Args = append([]string{"kubectl"}, args...)
	if err := cli.RunNoErrOutput(kubectl.NewDefaultKubectlCommand()); err != nil {
		kubectlutil.CheckErr(err)
	}
	return 0
}

// runEtcd keeps its data in the folder named by its argument, and is reached on loopback of the cluster's network namespace.
func runEtcd(args []string) int {
	if len(args) != 1 {
		fmt.Fprintln(os.Stderr, "usage: cluster etcd DIR")
		return 2
	}
	config := embed.NewConfig()
	config.Dir = args[0]
	config.LogLevel = "warn"
	// A cluster of the tests does not outlive its processes, so its data need not survive a power cut.
	config.UnsafeNoFsync = true
	client, peer := url.URL{Scheme: "http", Host: etcdAddress}, url.URL{Scheme: "http", Host: "127.0.0.1:2380"}
	config.ListenClientUrls, config.AdvertiseClientUrls = []url.URL{client}, []url.URL{client}
	config.ListenPeerUrls, config.AdvertisePeerUrls = []url.URL{peer}, []url.URL{peer}
	config.InitialCluster = config.InitialClusterFromName(config.Name)
	etcd, err := embed.StartEtcd(config)
	if err != nil {
		fmt.Fprintln(os.Stderr, "etcd:", err)
		return 1
	}
	select {
	case <-etcd.Server.ReadyNotify():
	case <-time.After(time.Minute):
		fmt.Fprintln(os.Stderr, "etcd: not ready after a minute")
		return 1
	}
	err = <-etcd.Err()
	fmt.Fprintln(os.Stderr, "etcd:", err)
	return 1
}
