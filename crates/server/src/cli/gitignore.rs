//! Which files of a folder `.gitignore` files name, as git reads them: the last pattern that matches decides, the files of
//! deeper folders come after those above them, and what is in an ignored folder is ignored.

use std::{
    fs::File,
    io::{self, Read as _},
    path::{Path, PathBuf},
    rc::Rc,
};

/// Maximum size of a `.gitignore` file that is read, in bytes.
const MAX_FILE_BYTES: u64 = 1 << 20;
/// Maximum number of patterns of a `.gitignore` file.
const MAX_PATTERNS: usize = 10_000;

/// Something found in a folder.
pub(crate) struct FoundEntry {
    /// Its path.
    pub(crate) path: PathBuf,
    /// Whether it is a folder; a link to one is not.
    pub(crate) is_folder: bool,
}

/// Whether the `.gitignore` files of the folders above count, up to the one that holds `.git`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ParentIgnoreFiles {
    /// They do.
    Count,
    /// They do not.
    Ignore,
}

/// Walks a folder in the order of names, folders before what is in them. `.git` and what `.gitignore` files name is left out;
/// links are not followed.
pub(crate) fn walk(
    root: &Path,
    above: ParentIgnoreFiles,
    mut each: impl FnMut(FoundEntry) -> oubliette_protocol::Result<()>,
) -> oubliette_protocol::Result<()> {
    let unreadable = |path: &Path, error: io::Error| {
        oubliette_protocol::Error::invalid(format!("{}: {error}", path.display()))
    };
    let mut files = match above {
        ParentIgnoreFiles::Count => files_above(root),
        ParentIgnoreFiles::Ignore => Vec::new(),
    };
    files.extend(IgnoreFile::read(root).map(Rc::new));
    let mut open = vec![(root.to_owned(), files)];
    while let Some((folder, files)) = open.pop() {
        let entries = std::fs::read_dir(&folder).map_err(|error| unreadable(&folder, error))?;
        let mut names = Vec::new();
        for entry in entries {
            let entry = entry.map_err(|error| unreadable(&folder, error))?;
            let kind = entry
                .file_type()
                .map_err(|error| unreadable(&entry.path(), error))?;
            names.push((entry.file_name(), kind.is_dir()));
        }
        names.sort();
        let mut below = Vec::new();
        for (name, is_folder) in names {
            let path = folder.join(&name);
            if name == ".git" || is_ignored(&files, &path, is_folder) {
                continue;
            }
            if is_folder {
                let mut files = files.clone();
                files.extend(IgnoreFile::read(&path).map(Rc::new));
                below.push((path.clone(), files));
            }
            each(FoundEntry { path, is_folder })?;
        }
        open.extend(below.into_iter().rev());
    }
    Ok(())
}

/// The files of the folders above one, if it is in a git repository.
fn files_above(root: &Path) -> Vec<Rc<IgnoreFile>> {
    if root.join(".git").exists() {
        return Vec::new();
    }
    let mut found = Vec::new();
    for folder in root.ancestors().skip(1) {
        found.extend(IgnoreFile::read(folder).map(Rc::new));
        if folder.join(".git").exists() {
            found.reverse();
            return found;
        }
    }
    Vec::new()
}

fn is_ignored(files: &[Rc<IgnoreFile>], path: &Path, is_folder: bool) -> bool {
    let decided = files.iter().rev().find_map(|file| file.decide(path, is_folder));
    decided.unwrap_or(false)
}

/// A `.gitignore` file.
struct IgnoreFile {
    folder: PathBuf,
    patterns: Vec<IgnorePattern>,
}

/// A line of it.
#[derive(Debug, PartialEq, Eq)]
struct IgnorePattern {
    /// Whether it takes back what one before it ignores.
    negated: bool,
    folders_only: bool,
    /// Without one, it matches names at any depth.
    anchored: bool,
    parts: Vec<String>,
}

impl IgnoreFile {
    fn read(folder: &Path) -> Option<Self> {
        let path = folder.join(".gitignore");
        // A pipe in its place would be waited for.
        if !path.symlink_metadata().ok()?.is_file() {
            return None;
        }
        let mut text = Vec::new();
        File::open(path)
            .ok()?
            .take(MAX_FILE_BYTES)
            .read_to_end(&mut text)
            .ok()?;
        let text = String::from_utf8_lossy(&text);
        Some(Self {
            folder: folder.to_owned(),
            patterns: text
                .lines()
                .filter_map(IgnorePattern::parse)
                .take(MAX_PATTERNS)
                .collect(),
        })
    }

    /// Whether it ignores a path; none if no pattern matches.
    fn decide(&self, path: &Path, is_folder: bool) -> Option<bool> {
        let below = path.strip_prefix(&self.folder).ok()?.to_string_lossy();
        let parts: Vec<&str> = below.split('/').collect();
        let matching = self
            .patterns
            .iter()
            .rev()
            .find(|pattern| pattern.matches(&parts, is_folder));
        matching.map(|pattern| !pattern.negated)
    }
}

impl IgnorePattern {
    /// Reads a line; none if it holds no pattern.
    fn parse(line: &str) -> Option<Self> {
        let mut line = line.strip_suffix('\r').unwrap_or(line);
        // Spaces at the end count only after a backslash.
        while let Some(shorter) = line.strip_suffix(' ').filter(|shorter| !shorter.ends_with('\\')) {
            line = shorter;
        }
        if line.is_empty() || line.starts_with('#') {
            return None;
        }
        let (negated, rest) = match line.strip_prefix('!') {
            Some(rest) => (true, rest),
            None => (false, line),
        };
        let (folders_only, rest) = match rest.strip_suffix('/') {
            Some(rest) => (true, rest),
            None => (false, rest),
        };
        let anchored = rest.contains('/');
        let rest = rest.strip_prefix('/').unwrap_or(rest);
        if rest.is_empty() {
            return None;
        }
        Some(Self {
            negated,
            folders_only,
            anchored,
            parts: rest.split('/').map(str::to_owned).collect(),
        })
    }

    fn matches(&self, path: &[&str], is_folder: bool) -> bool {
        if self.folders_only && !is_folder {
            return false;
        }
        match (self.anchored, self.parts.as_slice(), path.last()) {
            (false, [name], Some(last)) => matches_name(name, last),
            _ => self.matches_parts(path),
        }
    }

    /// Matches part by part; `**` stands for any number of them, at the end for at least one.
    fn matches_parts(&self, path: &[&str]) -> bool {
        // reached[n]: the patterns so far match the first n parts of the path.
        let mut reached = vec![false; path.len() + 1];
        reached[0] = true;
        for (number, part) in self.parts.iter().enumerate() {
            let mut next = vec![false; path.len() + 1];
            if part == "**" {
                let last = number + 1 == self.parts.len();
                let mut any = false;
                for (next, reached) in next.iter_mut().zip(&reached) {
                    *next = any || (*reached && !last);
                    any |= *reached;
                }
            } else {
                for (at, name) in path.iter().enumerate() {
                    next[at + 1] = reached[at] && matches_name(part, name);
                }
            }
            reached = next;
        }
        reached[path.len()]
    }
}

/// Whether a name matches a pattern with `*`, `?`, `[…]` and `\`. Takes time proportional to both lengths multiplied at most.
fn matches_name(pattern: &str, name: &str) -> bool {
    let (pattern, name): (Vec<char>, Vec<char>) = (pattern.chars().collect(), name.chars().collect());
    let (mut p, mut n) = (0, 0);
    // Where to go on if the text after the last star does not match.
    let mut star: Option<(usize, usize)> = None;
    while n < name.len() {
        if pattern.get(p) == Some(&'*') {
            star = Some((p + 1, n));
            p += 1;
            continue;
        }
        if let Some(next) = matches_one(&pattern, p, name[n]) {
            (p, n) = (next, n + 1);
            continue;
        }
        match &mut star {
            Some((after, from)) => {
                *from += 1;
                (p, n) = (*after, *from);
            }
            None => return false,
        }
    }
    pattern[p..].iter().all(|c| *c == '*')
}

/// Matches one character at a position of the pattern; returns the position after it.
fn matches_one(pattern: &[char], at: usize, c: char) -> Option<usize> {
    match pattern.get(at)? {
        '?' => Some(at + 1),
        '\\' => (pattern.get(at + 1) == Some(&c)).then_some(at + 2),
        '[' => matches_class(pattern, at, c),
        literal => (*literal == c).then_some(at + 1),
    }
}

/// Matches `[a-z]`, `[!a]` and `[^a]`. One that does not end matches nothing.
fn matches_class(pattern: &[char], at: usize, c: char) -> Option<usize> {
    let mut p = at + 1;
    let negated = matches!(pattern.get(p), Some('!' | '^'));
    p += usize::from(negated);
    let (mut found, mut first) = (false, true);
    loop {
        let mut low = *pattern.get(p)?;
        if low == ']' && !first {
            return (found != negated).then_some(p + 1);
        }
        first = false;
        if low == '\\' {
            p += 1;
            low = *pattern.get(p)?;
        }
        let mut high = low;
        if pattern.get(p + 1) == Some(&'-') && pattern.get(p + 2).is_some_and(|end| *end != ']') {
            high = *pattern.get(p + 2)?;
            p += 2;
        }
        found |= (low..=high).contains(&c);
        p += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ignores(lines: &str, path: &str, is_folder: bool) -> bool {
        let file = IgnoreFile {
            folder: "/r".into(),
            patterns: lines.lines().filter_map(IgnorePattern::parse).collect(),
        };
        is_ignored(&[Rc::new(file)], &Path::new("/r").join(path), is_folder)
    }

    #[test]
    fn patterns_mean_what_git_takes_them_to_mean() {
        for (lines, path, expected) in [
            ("*.log", "a.log", true),
            ("*.log", "d/e/a.log", true),
            ("*.log", "a.logs", false),
            ("/build", "build", true),
            ("/build", "d/build", false),
            ("d/build", "d/build", true),
            ("d/build", "x/d/build", false),
            ("**/x", "a/b/x", true),
            ("**/x", "x", true),
            ("a/**", "a/b/c", true),
            ("a/**", "a", false),
            ("a/**/z", "a/z", true),
            ("a/**/z", "a/b/c/z", true),
            ("*.log\n!keep.log", "keep.log", false),
            ("!keep.log\n*.log", "keep.log", true),
            ("# x\n\n", "# x", false),
            ("\\#x", "#x", true),
            ("\\!x", "!x", true),
            ("a?c", "abc", true),
            ("a?c", "ac", false),
            ("[a-c]x", "bx", true),
            ("[!a-c]x", "bx", false),
            ("[]]x", "]x", true),
            ("[ab", "a", false),
            ("x  ", "x", true),
            ("x\\ ", "x ", true),
            ("a*b*c", "aXXbYYc", true),
            ("a*b*c", "aXXbYY", false),
            ("*", "anything", true),
        ] {
            assert_eq!(ignores(lines, path, false), expected, "{lines:?} {path}");
        }
        assert!(ignores("d/", "d", true) && !ignores("d/", "d", false));
    }

    #[test]
    fn a_hostile_pattern_ends_soon() {
        let name = "a".repeat(255);
        assert!(!matches_name(&format!("{}b", "a*".repeat(1000)), &name));
        let path = vec!["a"; 2000].join("/");
        assert!(!ignores(&format!("{}b", "**/a/".repeat(500)), &path, false));
    }

    #[test]
    fn ignored_folders_are_not_entered_and_deeper_files_come_last() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("repo/sub");
        std::fs::create_dir_all(root.join("d")).unwrap();
        std::fs::create_dir_all(root.join("out/deep")).unwrap();
        std::fs::create_dir_all(dir.path().join("repo/.git")).unwrap();
        for (file, text) in [
            ("repo/.gitignore", "*.tmp\nout/"),
            ("repo/sub/d/.gitignore", "!keep.tmp"),
            ("repo/sub/a.tmp", ""),
            ("repo/sub/b", ""),
            ("repo/sub/d/keep.tmp", ""),
            ("repo/sub/d/c.tmp", ""),
            ("repo/sub/out/deep/x", ""),
        ] {
            std::fs::write(dir.path().join(file), text).unwrap();
        }
        let found = |above| {
            let mut found = Vec::new();
            walk(&root, above, |entry| {
                let below = entry.path.strip_prefix(&root).unwrap();
                found.push(below.to_string_lossy().into_owned());
                Ok(())
            })
            .unwrap();
            found
        };
        assert_eq!(
            found(ParentIgnoreFiles::Count),
            ["b", "d", "d/.gitignore", "d/keep.tmp"]
        );
        assert!(found(ParentIgnoreFiles::Ignore).contains(&"out/deep/x".to_owned()));
    }
}
