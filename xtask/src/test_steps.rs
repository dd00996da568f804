//! The steps of `cargo xtask test`.

use std::{collections::BTreeSet, ffi::OsStr, path::Path};

use anyhow::{Context, Result};

use crate::{
    book, build, cluster,
    dist::{self, DistProfile},
    fuzz::{self, FuzzEngine, FuzzOptions},
    links,
    postgres::TestPostgres,
    process::{StepRunner, run, run_with},
    setup,
};

/// How many failed Python tests are run once more; more than these are no accident.
const MAX_RUN_AGAIN: usize = 5;

/// How long each fuzz target runs; `cargo xtask fuzz` is for longer.
const FUZZ_SECONDS: u64 = 3;

const RUST_ON_POSTGRES: &str = "rust tests of the store on PostgreSQL";
const PYTHON_ON_POSTGRES: &str = "python tests on PostgreSQL";
/// The Python tests that run on PostgreSQL too.
const ON_BOTH_STORES: &[&str] = &[
    "test_foundation.py",
    "test_sessions.py",
    "test_caller_tool_relay.py",
    "test_approvals.py",
    "test_restart_after_kill.py",
    "test_backup.py",
    "test_store.py",
    "test_library.py",
    "test_cluster.py",
    "test_cluster_hop.py",
    "test_cluster_shared.py",
    "test_cluster_faults.py",
    "test_rolling_upgrade.py",
    "test_cluster_operation.py",
    "test_backup_workspaces.py",
];

/// Runs every step, or those whose name contains `only`, and prints how each ended.
pub(crate) fn run_steps(root: &Path, only: Option<&str>) -> Result<()> {
    let mut steps = StepRunner::new(only);
    steps.step("format", || run(root, "cargo", &["fmt", "--all", "--check"]));
    // Downloads, while the compiler runs.
    let [node, python] = [root.to_owned(), root.to_owned()];
    let setups = [
        steps.begin("setup: system packages", || {
            setup::install_system_packages(&setup::SYSTEM_PACKAGES)
        }),
        steps.begin("setup: node packages", move || {
            setup::install_node_packages(&node)
        }),
        steps.begin("setup: python packages", move || {
            setup::install_python_packages(&python).map(drop)
        }),
    ];
    steps.step("console: build", || build::build_console(root));
    steps.step("console: unit tests", || {
        run(&root.join("ui"), "npm", &["run", "--silent", "check"])
    });
    steps.step("book: build", || book::build_book(root));
    steps.step("book: code", || book::test_book(root));
    steps.step("links", || links::check_documents(root));
    steps.step("typescript client: build", || {
        build::build_typescript_client(root)
    });
    steps.step("typescript client: unit tests", || {
        run(&root.join("clients/typescript"), "npm", &["test", "--silent"])
    });
    steps.step("lint", || {
        run(
            root,
            "cargo",
            &[
                "clippy",
                "--workspace",
                "--all-targets",
                "--quiet",
                "--",
                "-D",
                "warnings",
            ],
        )
    });
    steps.step("licences and advisories", || check_dependencies(root));
    steps.step("docs", || {
        let args = [
            "doc",
            "--workspace",
            "--no-deps",
            "--document-private-items",
            "--quiet",
        ];
        run_with(
            root,
            "cargo",
            &args,
            &[("RUSTDOCFLAGS", OsStr::new("-D warnings"))],
        )
    });
    steps.step("build", || {
        run(
            root,
            "cargo",
            &["build", "--workspace", "--bins", "--examples", "--quiet"],
        )
    });
    for setup in setups {
        steps.end(setup);
    }
    let mut missing = None;
    steps.step("setup: packages that inject faults", || {
        missing = setup::install_fault_packages();
        Ok(())
    });
    let mut no_root = None;
    steps.step("setup: minimal root file system", || {
        no_root = setup::make_minimal_root(root);
        Ok(())
    });
    let mut no_engine = None;
    steps.step("setup: container engine", || {
        no_engine = setup::install_container_engine();
        Ok(())
    });
    for missing in [missing, no_root, no_engine].into_iter().flatten() {
        steps.note(missing);
    }
    steps.step("dist: debug programs", || dist::run_dist(root, DistProfile::Dev));
    let mut unsteady = Vec::new();
    steps.step("rust tests", || {
        let args = ["test", "--workspace", "--no-fail-fast"];
        if run(root, "cargo", &args).is_err() {
            println!("== once more: what fails again fails");
            run(root, "cargo", &args)?;
            unsteady.push(unsteady_note("Rust tests, named above"));
        }
        Ok(())
    });
    let is_wanted = [RUST_ON_POSTGRES, PYTHON_ON_POSTGRES]
        .iter()
        .any(|name| steps.is_wanted(name));
    let postgres = match is_wanted.then(|| TestPostgres::start(root)) {
        Some(Ok(postgres)) => Some(postgres),
        Some(Err(why)) => {
            steps.note(format!("tests on PostgreSQL are skipped: {why:#}"));
            None
        }
        None => None,
    };
    if let Some(postgres) = &postgres {
        steps.step(RUST_ON_POSTGRES, || {
            let args = ["test", "--package", "oubliette-store", "--no-fail-fast"];
            run_with(root, "cargo", &args, &postgres_env(postgres))
        });
    }
    steps.step("fuzz targets", || {
        let options = FuzzOptions {
            seconds: FUZZ_SECONDS,
            targets: Vec::new(),
            engine: Some(FuzzEngine::Random),
        };
        fuzz::run_targets(root, &options)
    });
    let kubeconfig = cluster::find_running(root);
    if let Err(why) = &kubeconfig {
        steps.note(format!("tests on Kubernetes are skipped: {why}"));
    }
    steps.step("python tests", || {
        let kubeconfig = kubeconfig.as_ref().ok().map(|path| path.as_os_str());
        let env: Vec<_> = kubeconfig
            .map(|path| ("OUBLIETTE_TEST_KUBECONFIG", path))
            .into_iter()
            .collect();
        unsteady.extend(run_python_tests(root, &[], &env)?);
        Ok(())
    });
    if let Some(postgres) = &postgres {
        steps.step(PYTHON_ON_POSTGRES, || {
            unsteady.extend(run_python_tests(root, ON_BOTH_STORES, &postgres_env(postgres))?);
            Ok(())
        });
    }
    steps.step("node tests", || {
        unsteady.extend(run_node_tests(root)?);
        Ok(())
    });
    for unsteady in unsteady {
        steps.note(unsteady);
    }
    steps.finish()
}

fn postgres_env(postgres: &TestPostgres) -> [(&'static str, &OsStr); 2] {
    [
        ("OUBLIETTE_TEST_STORE", OsStr::new("postgres")),
        ("OUBLIETTE_TEST_POSTGRES", OsStr::new(&postgres.socket_dir)),
    ]
}

fn program_dir(root: &Path) -> std::path::PathBuf {
    root.join("target/debug")
}

/// Runs these files of the Python tests; all if there are none. A few that fail are run once more by themselves, so that
/// one unsteady test does not hide how all the rest of a change fared; those that pass then are named in the result.
fn run_python_tests(root: &Path, only: &[&str], env: &[(&str, &OsStr)]) -> Result<Option<String>> {
    let python = setup::install_python_packages(root)?
        .to_string_lossy()
        .into_owned();
    let programs = program_dir(root);
    let env: Vec<_> = [("OUBLIETTE_BIN_DIR", programs.as_os_str())]
        .into_iter()
        .chain(env.iter().copied())
        .collect();
    // One more file at once than there are cores: most tests wait for something most of the time.
    let files = std::thread::available_parallelism().map_or(2, usize::from) + 1;
    let files = files.to_string();
    let args = [
        "-m",
        "pytest",
        "-q",
        "--no-header",
        "--dist",
        "loadfile",
        "-n",
        &files,
    ];
    let dir = root.join("tests/python");
    let failed_file = root.join("target/tmp/failed-python-tests");
    std::fs::create_dir_all(root.join("target/tmp"))?;
    std::fs::write(&failed_file, "")?;
    let first_env: Vec<_> = env
        .iter()
        .copied()
        .chain([("OUBLIETTE_TEST_FAILED", failed_file.as_os_str())])
        .collect();
    let Err(failure) = run_with(&dir, &python, &[&args, only].concat(), &first_env) else {
        return Ok(None);
    };
    let failed = std::fs::read_to_string(&failed_file)?;
    let failed: BTreeSet<&str> = failed.lines().collect();
    if failed.is_empty() || failed.len() > MAX_RUN_AGAIN {
        return Err(failure);
    }
    println!("== once more, one at a time: what fails again fails");
    let again: Vec<&str> = ["-m", "pytest", "-q", "--no-header"]
        .into_iter()
        .chain(failed.iter().copied())
        .collect();
    run_with(&dir, &python, &again, &env)?;
    let failed = failed.into_iter().collect::<Vec<_>>().join(", ");
    Ok(Some(unsteady_note(&failed)))
}

/// Runs the Node and browser tests, file by file; a file that fails is run once more like a failed Python test.
fn run_node_tests(root: &Path) -> Result<Option<String>> {
    let dir = root.join("tests/node");
    let env = [("OUBLIETTE_BIN_DIR", program_dir(root))];
    let env: Vec<_> = env.iter().map(|(k, v)| (*k, v.as_os_str())).collect();
    // Node 22 from npm: the conformance suite needs it, and the system's may be older.
    let node = dir
        .join("node_modules/node/bin/node")
        .to_string_lossy()
        .into_owned();
    let tests = std::fs::read_dir(&dir).context("tests/node is missing")?;
    let mut files: Vec<String> = tests
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| name.ends_with(".test.mjs"))
        .collect();
    files.sort();
    let run_file = |file: &String| run_with(&dir, &node, &["--test", file], &env);
    let failed: Vec<String> = files.into_iter().filter(|file| run_file(file).is_err()).collect();
    if failed.len() > MAX_RUN_AGAIN {
        anyhow::bail!("failed: {}", failed.join(", "));
    }
    for file in &failed {
        println!("== {file} once more: what fails again fails");
        run_file(file)?;
    }
    Ok((!failed.is_empty()).then(|| unsteady_note(&failed.join(", "))))
}

fn unsteady_note(failed: &str) -> String {
    format!("UNSTEADY, a bug to mend: failed once and passed when run again: {failed}")
}

/// Checks licences, bans and sources; advisories too if their database can be fetched.
fn check_dependencies(root: &Path) -> Result<()> {
    let deny = setup::install_cargo_deny(root)?.to_string_lossy().into_owned();
    run(
        root,
        &deny,
        &[
            "--workspace",
            "check",
            "--hide-inclusion-graph",
            "licenses",
            "bans",
            "sources",
        ],
    )?;
    if let Err(error) = run(
        root,
        &deny,
        &["--workspace", "check", "--hide-inclusion-graph", "advisories"],
    ) {
        let database = std::env::var_os("CARGO_HOME")
            .map(std::path::PathBuf::from)
            .or_else(|| std::env::home_dir().map(|home| home.join(".cargo")))
            .map(|home| home.join("advisory-dbs"));
        let fetched = database
            .and_then(|dir| std::fs::read_dir(dir).ok())
            .is_some_and(|mut entries| entries.any(|e| e.is_ok_and(|e| e.path().join("crates").is_dir())));
        if fetched {
            return Err(error);
        }
        eprintln!("advisories not checked: their database cannot be fetched from here");
    }
    Ok(())
}
