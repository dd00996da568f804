//! `cargo xtask dist`: what is handed to users, in `target/dist`. The same source gives the same bytes: files are sorted,
//! belong to root and have the time of the last commit (or `SOURCE_DATE_EPOCH`), and nothing is fetched that `cargo` and
//! `npm` have not got already.
//!
//! - [`tree`]: the files as they are installed, made once for every form. [`archive`]: tarballs and checksums.
//! - [`deb`]: the Debian package. [`sbom`]: what the programs are made of.

mod archive;
mod deb;
mod sbom;
mod tree;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::Result;

use crate::{
    build,
    process::{remove_built_folder, run},
    setup,
};

/// Which build the artifacts are made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum DistProfile {
    /// Debug programs, for the tests: quick to build, large.
    Dev,
    /// What is released.
    Release,
}

/// One making of the artifacts: what it reads, where it writes, and what it calls things.
struct Dist {
    root: PathBuf,
    /// Where artifacts go.
    out: PathBuf,
    /// Where they are put together.
    stage: PathBuf,
    profile: DistProfile,
    version: &'static str,
    /// Seconds since 1970 that every file has as its time.
    epoch: String,
}

impl Dist {
    /// `oubliette-<version>-<architecture>-linux`.
    fn name(&self) -> String {
        format!("oubliette-{}-{}-linux", self.version, std::env::consts::ARCH)
    }

    /// The folder with the built programs.
    fn programs(&self) -> PathBuf {
        self.root.join(match self.profile {
            DistProfile::Dev => "target/debug",
            DistProfile::Release => "target/release",
        })
    }
}

/// Builds the programs and makes every artifact.
pub(crate) fn run_dist(root: &Path, profile: DistProfile) -> Result<()> {
    let dist = Dist {
        root: root.to_owned(),
        out: root.join("target/dist"),
        stage: root.join("target/dist-stage"),
        profile,
        version: env!("CARGO_PKG_VERSION"),
        epoch: source_epoch(root)?,
    };
    match profile {
        DistProfile::Release => {
            // What is released serves the book; a build by itself goes on without mdBook.
            setup::install_mdbook(root)?;
            build::build_release(root)?;
        }
        // As the tests build them, so that nothing is compiled twice.
        DistProfile::Dev => run(
            root,
            "cargo",
            &["build", "--workspace", "--bins", "--examples", "--quiet"],
        )?,
    }
    for dir in [&dist.out, &dist.stage] {
        remove_built_folder(dir)?;
        fs::create_dir_all(dir)?;
    }
    let bill = sbom::write(&dist)?;
    let tree = tree::make(&dist, &bill)?;
    archive::make_tarball(&dist, &tree)?;
    archive::make_image(&dist, &tree)?;
    deb::make(&dist, &tree)?;
    archive::write_checksums(&dist.out, &["."])?;
    println!("in {}:", dist.out.display());
    run(&dist.out, "ls", &["-lh"])
}

/// The time that files of an archive have: `SOURCE_DATE_EPOCH`, else that of the last commit, else 1970.
fn source_epoch(root: &Path) -> Result<String> {
    if let Ok(given) = std::env::var("SOURCE_DATE_EPOCH") {
        return match given.parse::<u64>() {
            Ok(_) => Ok(given),
            Err(_) => anyhow::bail!("SOURCE_DATE_EPOCH is {given:?}, not a number of seconds"),
        };
    }
    let said = Command::new("git")
        .args(["log", "-1", "--format=%ct"])
        .current_dir(root)
        .output();
    let said = said.ok().filter(|said| said.status.success());
    let said = said.and_then(|said| String::from_utf8(said.stdout).ok());
    let said = said.map(|said| said.trim().to_owned());
    Ok(said
        .filter(|said| !said.is_empty())
        .unwrap_or_else(|| "0".to_owned()))
}
