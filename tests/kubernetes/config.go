package main

import (
	"os"
	"path/filepath"
	"strings"
)

func (n *Node) apiServerArguments() []string {
	return []string{
		"--etcd-servers=http://" + etcdAddress,
		"--bind-address=0.0.0.0",
		"--secure-port=" + apiPort,
		"--advertise-address=" + nodeAddress,
		"--tls-cert-file=" + n.certificate("kube-apiserver.crt"),
		"--tls-private-key-file=" + n.certificate("kube-apiserver.key"),
		"--client-ca-file=" + n.certificate("ca.crt"),
		"--service-account-issuer=https://kubernetes.default.svc.cluster.local",
		"--service-account-key-file=" + n.certificate("service-accounts.key"),
		"--service-account-signing-key-file=" + n.certificate("service-accounts.key"),
		"--service-cluster-ip-range=" + serviceRange,
		"--authorization-mode=Node,RBAC",
		"--enable-admission-plugins=NodeRestriction",
		"--allow-privileged=true",
		"--kubelet-certificate-authority=" + n.certificate("ca.crt"),
		"--kubelet-client-certificate=" + n.certificate("kubelet-client.crt"),
		"--kubelet-client-key=" + n.certificate("kubelet-client.key"),
		"--kubelet-preferred-address-types=InternalIP",
	}
}

func (n *Node) controllerManagerArguments() []string {
	kubeconfig := n.config("kube-controller-manager.kubeconfig")
	return []string{
		"--kubeconfig=" + kubeconfig,
		"--authentication-kubeconfig=" + kubeconfig,
		"--authorization-kubeconfig=" + kubeconfig,
		"--leader-elect=false",
		"--bind-address=127.0.0.1",
		"--use-service-account-credentials",
		"--service-account-private-key-file=" + n.certificate("service-accounts.key"),
		"--root-ca-file=" + n.certificate("ca.crt"),
	}
}

// writeConfigs writes the configuration files of what takes one.
func (n *Node) writeConfigs() error {
	if err := os.MkdirAll(n.config("cni"), 0o755); err != nil {
		return err
	}
	values := strings.NewReplacer(
		"@state", n.State, "@pause", pauseImage, "@socket", containerdSocket, "@plugins", pluginFolder,
		"@pods", podRange, "@node", nodeAddress, "@cgroup", cgroupName,
	)
	for name, text := range map[string]string{
		"containerd.toml":     containerdConfig,
		"cni/bridge.conflist": networkConfig,
		"kubelet.yaml":        kubeletConfig,
		"kube-proxy.yaml":     proxyConfig,
	} {
		path := filepath.Join(n.State, "config", name)
		if err := os.WriteFile(path, []byte(values.Replace(text)), 0o644); err != nil {
			return err
		}
	}
	return nil
}

const containerdConfig = `version = 2
root = "@state/containerd"
state = "/run/containerd"
# Makes /opt/containerd otherwise.
disabled_plugins = ["io.containerd.internal.v1.opt"]

[grpc]
address = "@socket"

[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "@pause"
disable_apparmor = true
# Without CAP_SYS_RESOURCE a process cannot lower its score, as the pause program is asked to.
restrict_oom_score_adj = true

[plugins."io.containerd.grpc.v1.cri".containerd]
snapshotter = "overlayfs"
default_runtime_name = "runc"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "@plugins"
conf_dir = "@state/config/cni"
`

// No address is translated: the host has a route to pods, so both see each other's addresses.
const networkConfig = `{
  "cniVersion": "0.4.0",
  "name": "oubliette-test",
  "plugins": [
    {
      "type": "bridge",
      "bridge": "pods0",
      "isGateway": true,
      "hairpinMode": true,
      "ipam": {
        "type": "host-local",
        "ranges": [[{"subnet": "@pods"}]],
        "routes": [{"dst": "0.0.0.0/0"}],
        "dataDir": "/run/cni-addresses"
      }
    },
    {"type": "portmap", "capabilities": {"portMappings": true}}
  ]
}
`

// Images are never removed, as none can be pulled again, and a full disk is no reason to evict before it is nearly full.
const kubeletConfig = `apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: @node
port: 10250
healthzBindAddress: 127.0.0.1
containerRuntimeEndpoint: unix://@socket
authentication:
  anonymous: {enabled: false}
  webhook: {enabled: true}
  x509: {clientCAFile: "@state/certificates/ca.crt"}
authorization: {mode: Webhook}
tlsCertFile: "@state/certificates/kubelet-server.crt"
tlsPrivateKeyFile: "@state/certificates/kubelet-server.key"
cgroupDriver: cgroupfs
cgroupRoot: /@cgroup
failCgroupV1: false
failSwapOn: false
localStorageCapacityIsolation: true
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
evictionHard:
  memory.available: 100Mi
  nodefs.available: 1%
  nodefs.inodesFree: 1%
  imagefs.available: 1%
nodeStatusUpdateFrequency: 5s
`

const proxyConfig = `apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
clientConnection: {kubeconfig: "@state/config/kube-proxy.kubeconfig"}
mode: iptables
clusterCIDR: @pods
hostnameOverride: oubliette-test
healthzBindAddress: 127.0.0.1:10256
metricsBindAddress: 127.0.0.1:10249
# These would be set for the whole machine.
conntrack: {maxPerCore: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
`
