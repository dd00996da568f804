package main

import (
	"archive/tar"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
)

const (
	containerdSocket = "/run/containerd/containerd.sock"
	pauseImage       = "oubliette-pause:latest"
)

// importRoot makes an image of the archive of a root file system and imports it into a running cluster.
func importRoot(state, name, root string) error {
	pid, err := os.ReadFile(filepath.Join(state, "inside.pid"))
	if err != nil {
		return fmt.Errorf("no cluster runs in %s", state)
	}
	image := filepath.Join(state, "images", fmt.Sprintf("import-%d.tar", os.Getpid()))
	defer os.Remove(image)
	if err := writeImage(image, name, root, nil); err != nil {
		return err
	}
	// containerd's socket is in the mount namespace of the cluster.
	enter := []string{"--target", strings.TrimSpace(string(pid)), "--mount", "--pid", "--net", "ctr"}
	return runQuietly("nsenter", append(enter, importArguments(image)...)...)
}

func importArguments(image string) []string {
	return []string{"--address", containerdSocket, "--namespace", "k8s.io", "images", "import", image}
}

// importPause makes and imports the image that holds the namespaces of each pod. It is run inside.
func importPause(state, program string) error {
	if program == "" {
		return errors.New("no program for the pause image was named")
	}
	layer := filepath.Join(state, "images", "pause-layer.tar")
	if err := writeArchiveOfProgram(layer, program); err != nil {
		return err
	}
	image := filepath.Join(state, "images", "pause.tar")
	if err := writeImage(image, pauseImage, layer, []string{"/pause"}); err != nil {
		return err
	}
	return runQuietly("ctr", importArguments(image)...)
}

// writeArchiveOfProgram writes an archive with one program, /pause.
func writeArchiveOfProgram(archive, program string) error {
	text, err := os.ReadFile(program)
	if err != nil {
		return err
	}
	return writeArchive(archive, func(writer *tar.Writer) error {
		return addFile(writer, "pause", 0o755, text)
	})
}

// writeImage writes an image with one layer in the form of `docker save`.
func writeImage(image, name, layer string, entrypoint []string) error {
	content, err := os.Open(layer)
	if err != nil {
		return err
	}
	defer content.Close()
	digest := sha256.New()
	size, err := io.Copy(digest, content)
	if err != nil {
		return err
	}
	if _, err := content.Seek(0, io.SeekStart); err != nil {
		return err
	}
	config, err := json.Marshal(map[string]any{
		"architecture": runtime.GOARCH,
		"os":           "linux",
		"config": map[string]any{
			"Env":        []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
			"Entrypoint": entrypoint,
		},
		"rootfs": map[string]any{
			"type":     "layers",
			"diff_ids": []string{"sha256:" + hex.EncodeToString(digest.Sum(nil))},
		},
	})
	if err != nil {
		return err
	}
	manifest, err := json.Marshal([]map[string]any{{
		"Config": "config.json", "RepoTags": []string{fullName(name)}, "Layers": []string{"layer.tar"},
	}})
	if err != nil {
		return err
	}
	return writeArchive(image, func(writer *tar.Writer) error {
		if err := addFile(writer, "manifest.json", 0o644, manifest); err != nil {
			return err
		}
		if err := addFile(writer, "config.json", 0o644, config); err != nil {
			return err
		}
		if err := writer.WriteHeader(&tar.Header{Name: "layer.tar", Mode: 0o644, Size: size}); err != nil {
			return err
		}
		_, err := io.Copy(writer, content)
		return err
	})
}

// fullName gives the name that containerd stores an image under: the kubelet asks for a short one by its full name.
func fullName(name string) string {
	if first, _, found := strings.Cut(name, "/"); found {
		if strings.ContainsAny(first, ".:") || first == "localhost" {
			return name
		}
		return "docker.io/" + name
	}
	return "docker.io/library/" + name
}

func writeArchive(path string, fill func(*tar.Writer) error) error {
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	defer file.Close()
	writer := tar.NewWriter(file)
	if err := fill(writer); err != nil {
		return err
	}
	if err := writer.Close(); err != nil {
		return err
	}
	return file.Close()
}

func addFile(writer *tar.Writer, name string, mode int64, text []byte) error {
	if err := writer.WriteHeader(&tar.Header{Name: name, Mode: mode, Size: int64(len(text))}); err != nil {
		return err
	}
	_, err := writer.Write(text)
	return err
}

// runQuietly runs a program whose output is shown only if it fails.
func runQuietly(program string, args ...string) error {
	if output, err := exec.Command(program, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w\n%s", program, strings.Join(args, " "), err, output)
	}
	return nil
}
