package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"

	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

// Authority signs the cluster's certificates. Its key is never written.
type Authority struct {
	folder      string
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
	pem         []byte
}

// newAuthority makes an authority and writes its certificate, ca.crt, into the folder.
func newAuthority(folder string) (*Authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template := certificateTemplate("oubliette-test-cluster")
	template.IsCA = true
	template.BasicConstraintsValid = true
	template.KeyUsage = x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature
	encoded, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, err
	}
	certificate, err := x509.ParseCertificate(encoded)
	if err != nil {
		return nil, err
	}
	authority := &Authority{folder: folder, certificate: certificate, key: key}
	authority.pem = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: encoded})
	return authority, os.WriteFile(authority.path("ca.crt"), authority.pem, 0o644)
}

func certificateTemplate(name string, groups ...string) *x509.Certificate {
	serial, _ := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	return &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{CommonName: name, Organization: groups},
		// Clocks of virtual machines may jump a little.
		NotBefore: time.Now().Add(-time.Hour),
		NotAfter:  time.Now().Add(30 * 24 * time.Hour),
	}
}

func (a *Authority) path(name string) string { return filepath.Join(a.folder, name) }

// issue signs a certificate and writes it and its key as NAME.crt and NAME.key. It is for servers too if it has hosts.
func (a *Authority) issue(file, name string, groups, hosts []string) (certificate, key []byte, err error) {
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	template := certificateTemplate(name, groups...)
	template.KeyUsage = x509.KeyUsageDigitalSignature
	template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth}
	for _, host := range hosts {
		if address := net.ParseIP(host); address != nil {
			template.IPAddresses = append(template.IPAddresses, address)
		} else {
			template.DNSNames = append(template.DNSNames, host)
		}
	}
	encoded, err := x509.CreateCertificate(rand.Reader, template, a.certificate, private.Public(), a.key)
	if err != nil {
		return nil, nil, err
	}
	certificate = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: encoded})
	if key, err = encodeKey(private); err != nil {
		return nil, nil, err
	}
	if err = os.WriteFile(a.path(file+".crt"), certificate, 0o644); err != nil {
		return nil, nil, err
	}
	return certificate, key, os.WriteFile(a.path(file+".key"), key, 0o600)
}

// issueKubeconfig writes a kubeconfig with a certificate of its own.
func (a *Authority) issueKubeconfig(path, file, name string, groups ...string) error {
	certificate, key, err := a.issue(file, name, groups, nil)
	if err != nil {
		return err
	}
	config := clientcmdapi.NewConfig()
	config.Clusters["oubliette-test"] = &clientcmdapi.Cluster{
		Server:                   "https://" + net.JoinHostPort(nodeAddress, apiPort),
		CertificateAuthorityData: a.pem,
	}
	config.AuthInfos[file] = &clientcmdapi.AuthInfo{ClientCertificateData: certificate, ClientKeyData: key}
	config.Contexts["oubliette-test"] = &clientcmdapi.Context{Cluster: "oubliette-test", AuthInfo: file}
	config.CurrentContext = "oubliette-test"
	return clientcmd.WriteToFile(*config, path)
}

// issueAll makes every certificate, key and kubeconfig of a cluster.
func issueAll(state string) error {
	authority, err := newAuthority(filepath.Join(state, "certificates"))
	if err != nil {
		return err
	}
	apiHosts := []string{
		nodeAddress, serviceAddress, "127.0.0.1", "localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc",
		"kubernetes.default.svc.cluster.local",
	}
	if _, _, err := authority.issue("kube-apiserver", "kube-apiserver", nil, apiHosts); err != nil {
		return err
	}
	if _, _, err := authority.issue("kubelet-server", nodeName, nil, []string{nodeName, nodeAddress}); err != nil {
		return err
	}
	if _, _, err := authority.issue("kubelet-client", "kube-apiserver", []string{"system:masters"}, nil); err != nil {
		return err
	}
	for file, identity := range map[string][]string{
		"kube-controller-manager": {"system:kube-controller-manager"},
		"kube-scheduler":          {"system:kube-scheduler"},
		"kube-proxy":              {"system:kube-proxy"},
		"kubelet":                 {"system:node:" + nodeName, "system:nodes"},
	} {
		path := filepath.Join(state, "config", file+".kubeconfig")
		if err := authority.issueKubeconfig(path, file, identity[0], identity[1:]...); err != nil {
			return err
		}
	}
	tokens, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	encoded, err := encodeKey(tokens)
	if err != nil {
		return err
	}
	if err := os.WriteFile(authority.path("service-accounts.key"), encoded, 0o600); err != nil {
		return err
	}
	return authority.issueKubeconfig(filepath.Join(state, "kubeconfig"), "admin", "admin", "system:masters")
}

func encodeKey(key *ecdsa.PrivateKey) ([]byte, error) {
	encoded, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, err
	}
	return pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: encoded}), nil
}
