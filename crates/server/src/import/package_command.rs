//! Commands that fetch a package and run it: `npx`, `bunx`, `uvx`, `pipx run` and their long forms. As a program the
//! package is fetched once, and pinned.

use oubliette_programs::PackageRequest;
use oubliette_protocol::{Error, Result, id::quoted, program::check_bin_name};

/// The package that a command fetches, and how it is run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PackageCommand {
    /// The package.
    pub request: PackageRequest,
    /// Its command, if the line names one.
    pub bin: Option<String>,
    /// The arguments of that command.
    pub args: Vec<String>,
    /// What the user should know.
    pub notes: Vec<String>,
}

/// What a launcher's option is followed by.
#[derive(Clone, Copy, PartialEq, Eq)]
enum OptionKind {
    /// Nothing; it changes nothing here.
    Flag,
    /// The package, if that is not the command's own name.
    Package,
    /// A version of the interpreter.
    Interpreter,
    /// Not supported.
    Unknown,
}

/// A program that fetches packages.
struct PackageRunner {
    parse: fn(&str) -> Result<PackageRequest>,
    option: fn(&str) -> OptionKind,
}

const NPX: PackageRunner = PackageRunner {
    parse: PackageRequest::parse_npm,
    option: |name| match name {
        "-y" | "--yes" | "-q" | "--quiet" | "--bun" | "--silent" | "-s" | "--prefer-online" => {
            OptionKind::Flag
        }
        "-p" | "--package" => OptionKind::Package,
        _ => OptionKind::Unknown,
    },
};
const UVX: PackageRunner = PackageRunner {
    parse: PackageRequest::parse_pypi,
    option: |name| match name {
        "-q" | "--quiet" | "--isolated" | "--refresh" | "-n" | "--no-cache" | "--no-progress" => {
            OptionKind::Flag
        }
        "--from" => OptionKind::Package,
        "-p" | "--python" => OptionKind::Interpreter,
        _ => OptionKind::Unknown,
    },
};
const PIPX: PackageRunner = PackageRunner {
    parse: PackageRequest::parse_pypi,
    option: |name| match name {
        "-q" | "--quiet" | "--no-cache" | "--verbose" => OptionKind::Flag,
        "--spec" => OptionKind::Package,
        "--python" => OptionKind::Interpreter,
        _ => OptionKind::Unknown,
    },
};

/// The package runner that a command line begins with, and the words after it.
fn package_runner<'a>(command: &str, args: &'a [String]) -> Option<(PackageRunner, &'a [String])> {
    let name = command.rsplit('/').next().unwrap_or(command);
    let name = name.strip_suffix(".cmd").unwrap_or(name);
    let word = |i: usize| args.get(i).map(String::as_str);
    match (name, word(0), word(1)) {
        // As configurations for Windows start it.
        ("cmd", Some("/c" | "/C"), Some(command)) => package_runner(command, &args[2..]),
        ("npx" | "bunx", _, _) => Some((NPX, args)),
        ("npm", Some("exec" | "x"), _) | ("pnpm" | "yarn", Some("dlx"), _) | ("bun", Some("x"), _) => {
            Some((NPX, &args[1..]))
        }
        ("uvx", _, _) => Some((UVX, args)),
        ("uv", Some("tool"), Some("run")) => Some((UVX, &args[2..])),
        ("pipx", Some("run"), _) => Some((PIPX, &args[1..])),
        _ => None,
    }
}

/// Reads a command that fetches a package; `None` if it is another command.
pub(crate) fn parse_package_command(command: &str, args: &[String]) -> Option<Result<PackageCommand>> {
    let (runner, words) = package_runner(command, args)?;
    Some(parse_words(&runner, words))
}

fn parse_words(runner: &PackageRunner, words: &[String]) -> Result<PackageCommand> {
    let mut package: Option<&str> = None;
    let mut notes = Vec::new();
    let mut words = words.iter().map(String::as_str);
    let positional = loop {
        let Some(word) = words.next() else {
            break None;
        };
        if word == "--" {
            break words.next();
        }
        if !word.starts_with('-') {
            break Some(word);
        }
        let (name, value) = match word.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (word, None),
        };
        match (runner.option)(name) {
            OptionKind::Flag => {}
            OptionKind::Package if package.is_some() => {
                return Err(Error::invalid("it names two packages; a program is one"));
            }
            OptionKind::Package => package = value.or_else(|| words.next()),
            OptionKind::Interpreter => {
                value.or_else(|| words.next());
                notes.push(format!(
                    "left out: {name}; a program runs with an interpreter that its package accepts"
                ));
            }
            OptionKind::Unknown => {
                return Err(Error::invalid(format!(
                    "its option {} has no counterpart in a program",
                    quoted(name)
                )));
            }
        }
    };
    let missing = || Error::invalid("it names no package");
    let (package, bin) = match (package, positional) {
        (Some(package), bin) => (package, bin),
        (None, package) => (package.ok_or_else(missing)?, None),
    };
    if let Some(bin) = bin {
        check_bin_name(bin).map_err(|why| Error::invalid(format!("{}: {why}", quoted(bin))))?;
    }
    Ok(PackageCommand {
        request: (runner.parse)(package)?,
        bin: bin.map(str::to_owned),
        args: words.map(str::to_owned).collect(),
        notes,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Option<Result<PackageCommand>> {
        let mut words = line.split_whitespace().map(str::to_owned);
        let command = words.next().unwrap();
        parse_package_command(&command, &words.collect::<Vec<_>>())
    }

    #[test]
    fn the_package_its_command_and_its_arguments_are_found() {
        for (line, package, bin, args) in [
            (
                "npx -y @s/server-x /workspace --flag",
                "npm:@s/server-x",
                None,
                "/workspace --flag",
            ),
            ("/usr/bin/npx --yes x@1.2.3", "npm:x@1.2.3", None, ""),
            (
                "npx -y --package=x@latest -- run -y",
                "npm:x@latest",
                Some("run"),
                "-y",
            ),
            ("npx -p x run a", "npm:x", Some("run"), "a"),
            ("npm exec -- x a", "npm:x", None, "a"),
            ("bunx x", "npm:x", None, ""),
            ("cmd /c npx -y @s/x a", "npm:@s/x", None, "a"),
            ("cmd /C npx.cmd x", "npm:x", None, ""),
            ("pnpm dlx x", "npm:x", None, ""),
            (
                "uvx mcp-server-time --local-timezone=UTC",
                "pypi:mcp-server-time",
                None,
                "--local-timezone=UTC",
            ),
            (
                "uvx --from mcp[cli]==1.2 mcp dev",
                "pypi:mcp==1.2",
                Some("mcp"),
                "dev",
            ),
            ("uvx --python 3.12 x@1.0", "pypi:x==1.0", None, ""),
            ("uv tool run x", "pypi:x", None, ""),
            ("pipx run --spec x==1 y z", "pypi:x==1", Some("y"), "z"),
        ] {
            let found = parse(line).unwrap().unwrap();
            assert_eq!(found.request.to_string(), package, "{line}");
            assert_eq!(found.bin.as_deref(), bin, "{line}");
            assert_eq!(found.args.join(" "), args, "{line}");
        }
    }

    #[test]
    fn what_cannot_be_a_program_is_refused_and_other_commands_are_left_alone() {
        for line in [
            "npx",
            "npx -y",
            "npx github:a/b",
            "npx ./local",
            "npx -c x",
            "npx -p x ../run",
            "npx -p x -p y run",
            "uvx --with y x",
            "uvx git+https://h/x",
            "uvx --from ../x y",
            "uvx --index-url http://h x",
            "pipx run --pip-args=x y",
        ] {
            assert!(parse(line).unwrap().is_err(), "{line}");
        }
        for line in [
            "node x.js",
            "npm start",
            "uv run x",
            "pipx install x",
            "docker run x",
            "cmd /c node x.js",
            "cmd /c",
        ] {
            assert!(parse(line).is_none(), "{line}");
        }
    }
}
