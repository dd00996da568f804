//! Tests of [`super`].

use super::*;
use crate::{BindMount, ResourceLimits, SocketMount};

fn settings(root: &Path) -> PodSettings {
    for dir in [
        "run/programs",
        "run/container-etc",
        "run/stage-1-2-0",
        "projects/p/workspaces/w",
        "agents-home",
        "programs/x",
    ] {
        std::fs::create_dir_all(root.join(dir)).unwrap();
    }
    for file in [
        "run/programs/oubliette-client",
        "run/container-etc/passwd",
        "run/container-etc/group",
    ] {
        std::fs::write(root.join(file), "").unwrap();
    }
    PodSettings {
        volume: SharedVolume::new(root, "oubliette"),
        client: root.join("run/programs/oubliette-client"),
        passwd: root.join("run/container-etc/passwd"),
        group: root.join("run/container-etc/group"),
        user: StageUser {
            uid: 64_646,
            gid: 64_646,
        },
        scope: "0123abcd".into(),
        server: "77-123456".into(),
        host: "node-1.example".into(),
        runtime_class: Some("gvisor".into()),
        cpu_request: 0.1,
        memory_request_mb: 128,
    }
}

fn image() -> PinnedImage {
    PinnedImage {
        name: "debian:12".into(),
        digest: "debian:12".into(),
    }
}

fn spec(root: &Path) -> SandboxSpec {
    let mut spec = SandboxSpec::new("gogol_01/tool server", ["/bin/agent", "--key", "sk-argument"]);
    spec.workspace = Some(root.join("projects/p/workspaces/w"));
    spec.home = Some(root.join("agents-home"));
    spec.mounts = vec![BindMount::read_only(root.join("programs/x"), "/opt/programs/x")];
    spec.sockets = vec![
        SocketMount::new("/host/relay.sock", "/mcp/relay.sock"),
        SocketMount::new("/host/model.sock", "/run/oubliette/model.sock"),
    ];
    spec.env = vec![("API_KEY".into(), "sk-variable".into())];
    spec.limits = ResourceLimits {
        memory_mb: Some(2048),
        cpus: Some(1.5),
        ..ResourceLimits::default()
    };
    spec
}

fn pod_of(root: &Path, spec: &SandboxSpec) -> Result<Pod, SandboxError> {
    let stage_dir = root.join("run/stage-1-2-0");
    settings(root).pod("oubliette-0123abcd-aa-0", spec, &image(), "gogol_01", &stage_dir)
}

#[test]
fn a_pod_has_the_restrictions_and_nothing_of_the_program() {
    let dir = tempfile::tempdir().unwrap();
    let pod = pod_of(dir.path(), &spec(dir.path())).unwrap();
    let text = serde_json::to_string_pretty(&pod).unwrap();
    assert!(
        !text.contains("sk-") && !text.contains("API_KEY") && !text.contains("/bin/agent"),
        "{text}"
    );
    insta::assert_snapshot!(text);
}

#[test]
fn a_pod_without_a_home_or_limits_has_temporary_ones() {
    let dir = tempfile::tempdir().unwrap();
    let mut spec = spec(dir.path());
    (spec.home, spec.workspace) = (None, None);
    spec.limits.memory_mb = Some(64);
    spec.limits.cpus = None;
    let pod = pod_of(dir.path(), &spec).unwrap().spec.unwrap();
    let container = &pod.containers[0];
    let home = container.volume_mounts.as_ref().unwrap().iter();
    let home: Vec<_> = home.filter(|mount| mount.mount_path == HOME).collect();
    assert_eq!(
        (home.len(), home[0].name.as_str(), &home[0].sub_path),
        (1, "home", &None)
    );
    let resources = container.resources.as_ref().unwrap();
    let requests = resources.requests.as_ref().unwrap();
    assert_eq!(
        requests["memory"].0,
        ((64 + 32) << 20).to_string(),
        "never more than the limit"
    );
    assert!(!resources.limits.as_ref().unwrap().contains_key("cpu"));
}

#[test]
fn a_path_outside_the_volume_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut spec = spec(dir.path());
    spec.mounts = vec![BindMount::read_only("/etc", "/host-etc")];
    let refused = pod_of(dir.path(), &spec).unwrap_err().to_string();
    assert!(
        refused.contains("/etc is not on the volume") && refused.contains("read_only"),
        "{refused}"
    );
}

#[test]
fn labels_take_what_kubernetes_takes() {
    for (text, label) in [
        ("gogol_01J", "gogol_01J"),
        ("a b/c", "a-b-c"),
        ("-x-", "x"),
        ("", ""),
        ("ä", ""),
    ] {
        assert_eq!(label_value(text), label);
    }
    assert!(label_value(&"a".repeat(100)).len() <= MAX_LABEL);
}
