//! Installs PyPI packages into a virtual environment of their own: pip resolves and downloads, and Oubliette reads what
//! it made.

use std::{collections::BTreeMap, path::Path};

use oubliette_protocol::{
    Error, Result,
    id::quoted,
    program::{PackageRef, check_bin_name, is_exact_pypi_version},
};
use oubliette_sandbox::BindMount;
use serde_json::Value;

use crate::{
    manifest::{BinCommand, Interpreter, ProgramId},
    python_interpreter::{INTERPRETER_DIRS, SEEN_DIR, find_interpreter, no_interpreter, wanted_python},
    registries::{CredentialAccess, PipConfig},
    sandboxed::{InstallRun, InstallStep, SCRATCH_INSIDE, StepOutput},
    tree_file::{read_start, read_text},
};

/// Maximum size of a file of a package's metadata, in bytes.
const MAX_METADATA_BYTES: u64 = 1 << 20;
/// Maximum number of commands of a package.
const MAX_BINS: usize = 100;
/// Makes an environment `$2` with the interpreter `$1` and installs `$3` in it. Further arguments are pip's. The
/// interpreter's own pip is preferred: with `--python`, pip runs in the interpreter it installs for, and the system's
/// may be too old for a newer one.
const INSTALL: &str = r#"
    python=$1 venv=$2 package=$3
    shift 3
    "$python" -m venv --without-pip --symlinks -- "$venv" || exit
    pip=python3
    if "$python" -m pip --version >/dev/null 2>&1; then pip=$python; fi
    exec "$pip" -m pip --python "$venv/bin/python" install "$@" "$package" 1>&2
"#;

/// pip with the operator's configuration, for one installation.
pub(crate) struct PypiInstaller<'a> {
    pub(crate) run: &'a InstallRun,
    pub(crate) config: &'a PipConfig,
}

impl PypiInstaller<'_> {
    /// Installs a package into an empty directory; returns its commands.
    pub(crate) async fn install(
        &self,
        package: &PackageRef,
        id: &ProgramId,
        scripts: bool,
        tree: &Path,
    ) -> Result<BTreeMap<String, BinCommand>> {
        self.run.progress.begin("resolving and downloading packages");
        let wheels = ["--only-binary", ":all:"];
        let mut python = "python3".to_owned();
        let mut output = self
            .pip_install(&python, package, id, tree, &wheels, CredentialAccess::Given)
            .await?;
        if let Some(wanted) = wanted_python(&package.version, &output) {
            python = find_interpreter(&INTERPRETER_DIRS, SEEN_DIR, &wanted)
                .await
                .ok_or_else(|| no_interpreter(package, &wanted))?;
            self.run.progress.begin(format!("installing for {python}"));
            clear(tree).await?;
            output = self
                .pip_install(&python, package, id, tree, &wheels, CredentialAccess::Given)
                .await?;
        }
        if !output.success() && scripts && needs_building(&output) {
            self.run
                .progress
                .begin("building packages, which runs their scripts");
            clear(tree).await?;
            // Without credentials: what a package brings is run.
            output = self
                .pip_install(&python, package, id, tree, &[], CredentialAccess::Withheld)
                .await?;
        }
        match output.success() {
            true => read_bins(tree, package),
            false => Err(self.error(package, scripts, &output)),
        }
    }

    /// Finds the version that pip would install for a name and a version specifier, such as `>=1,<2`.
    pub(crate) async fn find_version(&self, name: &str, specifier: &str) -> Result<String> {
        self.run.progress.begin(format!("looking {name} up"));
        let argv = [
            "python3",
            "-m",
            "pip",
            "install",
            "--dry-run",
            "--ignore-installed",
            "--no-deps",
            "--ignore-requires-python",
            "--only-binary",
            ":all:",
            "--quiet",
            "--report",
            "-",
            &format!("{name}{specifier}"),
        ]
        .map(str::to_owned);
        let output = self
            .run
            .run(self.step(argv.to_vec(), Vec::new(), CredentialAccess::Given))
            .await?;
        if !output.success() {
            let what = format!("pypi:{name}{specifier}");
            return Err(match output.connection_error(&what, &self.config.hosts) {
                Some(error) if output.registry_unreachable() || !says_missing(&output) => error,
                _ => self.failure(&what, &output),
            });
        }
        let report: Value = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
        let version = report["install"][0]["metadata"]["version"].as_str();
        version
            .filter(|version| is_exact_pypi_version(version))
            .map(str::to_owned)
            .ok_or_else(|| Error::unavailable(format!("pip does not say which version of {name} there is")))
    }

    async fn pip_install(
        &self,
        python: &str,
        package: &PackageRef,
        id: &ProgramId,
        tree: &Path,
        options: &[&str],
        credentials: CredentialAccess,
    ) -> Result<StepOutput> {
        let venv = format!("{}/venv", id.inside());
        let pinned = package.pinned_text();
        let argv = [
            "sh",
            "-c",
            INSTALL,
            "install",
            python,
            &venv,
            &pinned,
            "--no-warn-script-location",
        ];
        let argv = argv
            .iter()
            .chain(options)
            .map(|word| (*word).to_owned())
            .collect();
        let mounts = vec![BindMount::read_write(tree, id.inside())];
        self.run.run(self.step(argv, mounts, credentials)).await
    }

    fn step(
        &self,
        argv: Vec<String>,
        mounts: Vec<BindMount>,
        credentials: CredentialAccess,
    ) -> InstallStep<'_> {
        let mut env = self.config.variables(credentials);
        for (name, value) in [
            ("PIP_CACHE_DIR", format!("{SCRATCH_INSIDE}/pip")),
            ("PIP_NO_INPUT", "1".into()),
            ("PIP_DISABLE_PIP_VERSION_CHECK", "1".into()),
            ("PIP_PROGRESS_BAR", "off".into()),
            ("PIP_RETRIES", "1".into()),
            ("PIP_TIMEOUT", "60".into()),
        ] {
            env.push((name.into(), value));
        }
        InstallStep {
            argv,
            env,
            mounts,
            cwd: SCRATCH_INSIDE.into(),
            hosts: Some(&self.config.hosts),
            secrets: &self.config.secrets,
            certificates: &self.config.certificates,
        }
    }

    fn error(&self, package: &PackageRef, scripts: bool, output: &StepOutput) -> Error {
        let what = package.to_string();
        if output.stderr.contains("No module named pip") || output.stderr.contains("No module named venv") {
            return Error::unavailable(
                "the server's python3 has no pip or no venv; install both (Debian: python3-pip and python3-venv)",
            )
            .with_cause(output.stderr.as_str());
        }
        // pip says of an index that it does not reach that the package is missing there.
        if let Some(error) = output.connection_error(&what, &self.config.hosts)
            && (output.registry_unreachable() || !says_missing(output))
        {
            return error;
        }
        if needs_building(output) && !scripts {
            return Error::not_found(format!(
                "{what}: the index has no such package or version ({}), or no wheel of it or of a package it needs. \
                 Check name and version; a package that has to be built runs its scripts, which `\"scripts\": true` \
                 (--scripts) allows",
                self.config.hosts
            ))
            .with_cause(output.stderr.as_str());
        }
        self.failure(&what, output)
    }

    fn failure(&self, what: &str, output: &StepOutput) -> Error {
        if says_missing(output) {
            return Error::not_found(format!(
                "{what}: the index has no such package or version ({}); check both with `pip index versions`",
                self.config.hosts
            ))
            .with_cause(output.stderr.as_str());
        }
        if output.stderr.contains("DO NOT MATCH THE HASHES") {
            return Error::unavailable(format!(
                "{what}: what came is not what its index promises; nothing of it is used. Try again, and tell \
                 whoever runs the index"
            ))
            .with_cause(output.stderr.as_str());
        }
        let lines = || {
            output
                .stderr
                .lines()
                .map(str::trim)
                .filter(|line| !line.is_empty())
        };
        let reported = lines().rfind(|line| line.starts_with("ERROR: "));
        let last: String = reported
            .or_else(|| lines().next_back())
            .unwrap_or("pip failed")
            .trim_start_matches("ERROR: ")
            .chars()
            .filter(|c| !c.is_control())
            .take(400)
            .collect();
        let advice = match reported {
            Some(_) => format!(
                "The index may be broken ({}); try again, or read",
                self.config.hosts
            ),
            // It was not pip that failed, or not by what an index sent.
            None => "Read".to_owned(),
        };
        Error::unavailable(format!(
            "{what} could not be installed: {last}. {advice} pip's words in the server's log"
        ))
        .with_cause(output.stderr.as_str())
    }
}

fn says_missing(output: &StepOutput) -> bool {
    output.stderr.contains("No matching distribution found")
}

/// Whether pip found no wheel.
fn needs_building(output: &StepOutput) -> bool {
    says_missing(output)
}

/// Removes what an earlier attempt left.
async fn clear(tree: &Path) -> Result<()> {
    let removed = oubliette_os::remove_tree(tree.join("venv")).await;
    removed.map(drop).map_err(Error::internal)
}

/// The commands of a package: its console scripts.
fn read_bins(tree: &Path, package: &PackageRef) -> Result<BTreeMap<String, BinCommand>> {
    let mut bins = BTreeMap::new();
    let libraries = tree.join("venv/lib");
    for python in std::fs::read_dir(libraries).map_err(Error::internal)?.flatten() {
        let site = Path::new("venv/lib")
            .join(python.file_name())
            .join("site-packages");
        for entry in std::fs::read_dir(tree.join(&site))
            .into_iter()
            .flatten()
            .flatten()
        {
            let name = entry.file_name();
            let Some(name) = name.to_str().filter(|name| name.ends_with(".dist-info")) else {
                continue;
            };
            let distribution = name.split('-').next().unwrap_or_default();
            if normalized(distribution) != normalized(&package.name) {
                continue;
            }
            let file = site.join(name).join("entry_points.txt");
            let Ok(text) = read_text(tree, &file, MAX_METADATA_BYTES) else {
                continue;
            };
            for bin in console_scripts(&text).into_iter().take(MAX_BINS) {
                check_bin_name(&bin).map_err(|_| {
                    Error::invalid(format!(
                        "{package}: its command {} has a name that is a path or an option, so the package is not \
                         installed",
                        quoted(&bin)
                    ))
                })?;
                let file = Path::new("venv/bin").join(&bin);
                if read_start(tree, &file).is_ok() {
                    let command = BinCommand {
                        interpreter: Interpreter::Python,
                        options: Vec::new(),
                        file: file.to_string_lossy().into_owned(),
                    };
                    bins.insert(bin, command);
                }
            }
        }
    }
    match bins.is_empty() {
        true => Err(Error::invalid(format!(
            "{package} has no command: it is a library, not a program; name the package whose command is to be run"
        ))),
        false => Ok(bins),
    }
}

/// A package's name in the form in which names are compared.
fn normalized(name: &str) -> String {
    let mut out = String::new();
    for c in name.chars() {
        match c {
            '-' | '_' | '.' if out.ends_with('-') => {}
            '-' | '_' | '.' => out.push('-'),
            c => out.push(c.to_ascii_lowercase()),
        }
    }
    out
}

/// The names in the section `console_scripts` of an `entry_points.txt`.
fn console_scripts(text: &str) -> Vec<String> {
    let mut within = false;
    let mut names = Vec::new();
    for line in text.lines().map(str::trim) {
        if line.starts_with('[') {
            within = line == "[console_scripts]";
        } else if within && let Some((name, _)) = line.split_once('=') {
            names.push(name.trim().to_owned());
        }
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn console_scripts_are_the_commands_and_path_tricks_are_refused() {
        let package: PackageRef = "pypi:My.Tool==1.0".parse().unwrap();
        let make = |scripts: &str| {
            let dir = tempfile::tempdir().unwrap();
            let info = dir
                .path()
                .join("venv/lib/python3.11/site-packages/my_tool-1.0.dist-info");
            std::fs::create_dir_all(&info).unwrap();
            std::fs::create_dir_all(dir.path().join("venv/bin")).unwrap();
            std::fs::write(dir.path().join("venv/bin/tool"), "#!python").unwrap();
            std::os::unix::fs::symlink("/bin/sh", dir.path().join("venv/bin/link")).unwrap();
            std::fs::write(info.join("entry_points.txt"), scripts).unwrap();
            dir
        };
        let dir = make(
            "[gui_scripts]\nx = y:z\n[console_scripts]\ntool = my.tool:main\nlink = a:b\nabsent = a:b\n",
        );
        let bins = read_bins(dir.path(), &package).unwrap();
        assert_eq!(bins.keys().collect::<Vec<_>>(), ["tool"]);
        assert_eq!(bins["tool"].file, "venv/bin/tool");
        for scripts in [
            "",
            "[console_scripts]\n../../x = a:b\n",
            "[console_scripts]\n-c = a:b\n",
        ] {
            assert!(read_bins(make(scripts).path(), &package).is_err(), "{scripts:?}");
        }
    }
}
