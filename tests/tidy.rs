//! The rules of the source tree that a compiler does not check: who may know whom, where unsafe code lives, how long a
//! file may be, where a value may be unwrapped.
//!
//! Sources are read as text with comments, strings and test modules taken out. A `crate::name` path is a dependency.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Each module of the engine and the modules it may use. What is not listed is refused, so a new module needs a line.
const ENGINE: &[(&str, &[&str])] = &[
    ("limits", &[]),
    ("manual", &[]),
    ("size", &[]),
    ("meter", &["limits"]),
    ("kernels", &["limits"]),
    ("ops", &["kernels", "limits"]),
    ("checkpoint", &["kernels", "limits", "size", "io"]),
    ("model", &["checkpoint", "kernels", "limits", "io"]),
    ("store", &["checkpoint", "kernels", "limits", "meter", "io"]),
    ("forward", &["checkpoint", "kernels", "limits", "meter", "model", "ops", "store"]),
    ("engine", &["checkpoint", "forward", "kernels", "limits", "meter", "model", "ops", "store", "io"]),
    ("grammar", &["engine", "limits", "model"]),
    ("cli", &["checkpoint", "engine", "grammar", "kernels", "limits", "meter", "model", "size", "store", "io"]),
];

/// The same for the crate that reads files.
const IO: &[(&str, &[&str])] = &[
    ("limits", &[]),
    ("sector", &[]),
    ("error", &["limits"]),
    ("space", &["error"]),
    ("drive", &["limits"]),
    ("arena", &["error", "limits"]),
    ("heap", &[]),
    ("numa", &["error", "limits"]),
    ("block", &["limits"]),
    ("access", &["arena", "error", "limits", "sector"]),
    ("pool", &["arena", "error", "limits", "sector"]),
    ("file", &["access", "block", "drive", "error", "limits", "sector"]),
    ("plan", &["access", "error", "file", "limits", "sector"]),
    ("device", &["access", "arena", "block", "drive", "error", "file", "limits", "plan", "pool", "sector"]),
    ("write", &["access", "error", "limits", "pool"]),
    ("measure", &["access", "arena", "block", "device", "error", "file", "limits", "plan", "pool"]),
];

/// Pure policy and plain data of `io`: no system call.
const PURE: &[&str] = &[
    "io/src/sector.rs",
    "io/src/plan.rs",
    "io/src/drive.rs",
    "io/src/device/progress.rs",
    "io/src/device/route.rs",
    "io/src/device/schedule.rs",
    "io/src/measure/plan.rs",
    "io/src/measure/summary.rs",
];

/// What the store may take from the kernels: the shapes of weights, no arithmetic.
const STORE_FROM_KERNELS: &[&str] = &["WeightRef", "MatrixSpec"];

/// The only files that may hold unsafe code, each with `allow(unsafe_code)`.
const UNSAFE: &[&str] = &[
    "io/src/access.rs",
    "io/src/arena.rs",
    "io/src/device/clock.rs",
    "io/src/device/map.rs",
    "io/src/device/ring.rs",
    "io/src/device/ring_setup.rs",
    "io/src/device/threads.rs",
    "io/src/heap.rs",
    "io/src/measure/host.rs",
    "io/src/numa.rs",
    "io/src/pool.rs",
    "io/src/space.rs",
    "src/kernels/amx/mod.rs",
    "src/kernels/avx2/mod.rs",
    "src/kernels/avx512/mod.rs",
    "src/kernels/chunks.rs",
    "src/kernels/matmul.rs",
    "src/kernels/mod.rs",
    "src/kernels/team.rs",
];

/// The only files that look at the environment, and what of it.
const ENVIRONMENT: &[&str] = &["src/cli/machine.rs", "src/main.rs"];

/// Values taken out of an `Option` or `Result` without a second way, with the number of places and the reason.
const UNWRAPS: &[(&str, usize, &str)] = &[
    ("src/kernels/avx2/integer.rs", 3, "the units that fit were counted"),
    ("src/kernels/avx512/integer.rs", 2, "the units that fit were counted"),
    ("src/meter.rs", 1, "a histogram between two constants"),
];

const LINES_MAX: usize = 1000;

struct Source {
    /// From the root of the repository.
    path: String,
    text: String,
    /// Without comments, the contents of strings, and tests.
    code: String,
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn rust_files(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            rust_files(&path, found);
        } else if path.extension().is_some_and(|e| e == "rs") {
            found.push(path);
        }
    }
}

/// Every source of `src` and `io/src`, files that are test modules left out.
fn sources() -> Vec<Source> {
    let mut files = vec![];
    rust_files(&root().join("src"), &mut files);
    rust_files(&root().join("io/src"), &mut files);
    files.sort();
    let mut tests = BTreeSet::new();
    let mut sources = vec![];
    for file in &files {
        let text = fs::read_to_string(file).unwrap();
        let code = strip(&text);
        tests.extend(test_files(file, &code));
        let path = file.strip_prefix(root()).unwrap().to_str().unwrap().to_owned();
        sources.push(Source { path, text, code: without_tests(&code) });
    }
    // A name that ends in `_tests` is for those that a `path` attribute puts beside their parent.
    sources.retain(|s| !tests.contains(&root().join(&s.path)) && !s.path.ends_with("_tests.rs"));
    assert!(sources.len() > 50, "only {} sources found", sources.len());
    sources
}

/// Replaces comments and the contents of strings and character literals by nothing; lines stay.
fn strip(text: &str) -> String {
    let b = text.as_bytes();
    let (mut out, mut i) = (String::with_capacity(text.len()), 0);
    while i < b.len() {
        let rest = &text[i..];
        let skip = if rest.starts_with("//") {
            rest.find('\n').unwrap_or(rest.len())
        } else if rest.starts_with("/*") {
            rest.find("*/").map_or(rest.len(), |end| end + 2)
        } else if b[i] == b'r' && (rest.starts_with("r\"") || rest.starts_with("r#\"")) && !is_word_before(b, i) {
            let hashes = rest[1..].find('"').unwrap();
            let close = format!("\"{}", "#".repeat(hashes));
            2 + hashes + rest[2 + hashes..].find(&close).unwrap() + close.len()
        } else if b[i] == b'"' {
            string_len(rest)
        } else if b[i] == b'\'' {
            char_len(rest)
        } else {
            0
        };
        if skip == 0 {
            let c = rest.chars().next().unwrap();
            out.push(c);
            i += c.len_utf8();
        } else {
            out.extend(rest[..skip].chars().filter(|&c| c == '\n'));
            i += skip;
        }
    }
    out
}

fn is_word_before(b: &[u8], i: usize) -> bool {
    i > 0 && (b[i - 1].is_ascii_alphanumeric() || b[i - 1] == b'_')
}

/// Bytes of the string literal that `rest` begins with.
fn string_len(rest: &str) -> usize {
    let mut escaped = false;
    for (i, c) in rest.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' => return i + 1,
            _ => {}
        }
    }
    rest.len()
}

/// Bytes of the character literal that `rest` begins with; 0 for a lifetime.
fn char_len(rest: &str) -> usize {
    let mut chars = rest.char_indices().skip(1);
    match chars.next() {
        Some((_, '\\')) => rest[2..].find('\'').map_or(0, |end| if &rest[2..3] == "'" { 4 } else { end + 3 }),
        Some(_) => match chars.next() {
            Some((i, '\'')) => i + 1,
            _ => 0,
        },
        None => 0,
    }
}

/// Files of `#[cfg(test)] mod name;` declarations in `file`.
fn test_files(file: &Path, code: &str) -> Vec<PathBuf> {
    let dir = match file.file_stem().unwrap().to_str().unwrap() {
        "mod" | "lib" | "main" => file.parent().unwrap().to_owned(),
        stem => file.parent().unwrap().join(stem),
    };
    let mut found = vec![];
    for piece in code.split("#[cfg(test)]").skip(1) {
        let declared = piece.trim_start().strip_prefix("mod ").and_then(|m| m.split_once(';'));
        let is_name = |name: &str| name.chars().all(|c| c.is_alphanumeric() || c == '_');
        found.extend(declared.filter(|(name, _)| is_name(name)).map(|(name, _)| dir.join(format!("{name}.rs"))));
    }
    found
}

/// Cuts every item behind `#[cfg(test)]` that has a body.
fn without_tests(code: &str) -> String {
    let mut pieces = code.split("#[cfg(test)]");
    let mut out = pieces.next().unwrap().to_owned();
    for piece in pieces {
        let end = match (piece.find('{'), piece.find(';')) {
            (Some(open), semicolon) if semicolon.is_none_or(|at| open < at) => {
                let mut depth = 0;
                let close = piece[open..].find(|c| {
                    depth += i32::from(c == '{') - i32::from(c == '}');
                    depth == 0
                });
                open + close.unwrap() + 1
            }
            (_, Some(semicolon)) => semicolon + 1,
            (_, None) => piece.len(),
        };
        out.push_str(&piece[end..]);
    }
    out
}

/// Words that follow `crate::`, directly or in braces.
fn crate_paths(code: &str) -> Vec<String> {
    paths_after(code, "crate::")
}

fn paths_after(code: &str, prefix: &str) -> Vec<String> {
    let word = |s: &str| s.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect::<String>();
    let mut found = vec![];
    for (at, _) in code.match_indices(prefix) {
        if is_word_before(code.as_bytes(), at) {
            continue;
        }
        let rest = &code[at + prefix.len()..];
        let Some(group) = rest.strip_prefix('{') else {
            found.push(word(rest));
            continue;
        };
        let (mut depth, mut start) = (0, true);
        for (i, c) in group.char_indices() {
            match c {
                '}' if depth == 0 => break,
                '{' => depth += 1,
                '}' => depth -= 1,
                ',' if depth == 0 => start = true,
                c if start && !c.is_whitespace() => {
                    found.push(word(&group[i..]));
                    start = false;
                }
                _ => {}
            }
        }
    }
    found
}

/// Top-level module of a file, `None` for the root of the crate; and how many `super` lead out of it.
fn module_of<'a>(path: &'a str, crate_dir: &str) -> Option<(&'a str, usize)> {
    let inside = path.strip_prefix(crate_dir)?;
    let parts: Vec<&str> = inside.trim_end_matches(".rs").split('/').collect();
    match parts.as_slice() {
        ["lib" | "main"] => None,
        parts => Some((parts[0], parts.iter().filter(|p| **p != "mod").count())),
    }
}

fn check_layers(crate_dir: &str, table: &[(&str, &[&str])]) -> Vec<String> {
    let table: BTreeMap<&str, &[&str]> = table.iter().copied().collect();
    let mut faults = vec![];
    for source in sources() {
        let Some((module, depth)) = module_of(&source.path, crate_dir) else { continue };
        let Some(allowed) = table.get(module) else {
            faults.push(format!("{}: module `{module}` has no line in the table", source.path));
            continue;
        };
        let mut used = crate_paths(&source.code);
        if source.code.contains("millstream_io") && crate_dir == "src/" {
            used.push("io".into());
        }
        for name in used {
            // A function or type at the root of `io` is a re-export of a module that has a line of its own.
            if name != module && !allowed.contains(&name.as_str()) {
                faults.push(format!("{}: `{module}` may not use `{name}`", source.path));
            }
        }
        if source.code.contains(&"super::".repeat(depth)) {
            faults.push(format!("{}: leaves its module by `super`, where this test does not look", source.path));
        }
    }
    faults
}

#[track_caller]
fn assert_none(faults: Vec<String>) {
    assert!(faults.is_empty(), "\n{}", faults.join("\n"));
}

#[test]
fn modules_use_only_what_lies_below_them() {
    assert_none(check_layers("src/", ENGINE));
    assert_none(check_layers("io/src/", IO));
}

#[test]
fn the_io_crate_knows_no_model() {
    let manifest = fs::read_to_string(root().join("io/Cargo.toml")).unwrap();
    assert!(!manifest.lines().any(|line| line.starts_with("millstream ") || line.starts_with("millstream=")));
    for source in sources().iter().filter(|s| s.path.starts_with("io/")) {
        for word in ["expert", "tensor", "layer", "token", "safetensors"] {
            assert!(!source.code.to_lowercase().contains(word), "{} speaks of a {word}", source.path);
        }
    }
}

#[test]
fn the_store_knows_shapes_of_weights_and_no_arithmetic() {
    for source in sources().iter().filter(|s| s.path.starts_with("src/store/")) {
        for name in paths_after(&source.code, "kernels::") {
            assert!(STORE_FROM_KERNELS.contains(&name.as_str()), "{} uses kernels::{name}", source.path);
        }
    }
}

#[test]
fn planning_makes_no_system_call() {
    for path in PURE {
        let all = sources();
        let source = all.iter().find(|s| s.path == *path).unwrap_or_else(|| panic!("{path} is gone"));
        for call in ["libc::", "std::fs", "std::thread", "std::time::Instant", "unsafe"] {
            assert!(!source.code.contains(call), "{path} uses {call}");
        }
    }
}

#[test]
fn one_module_looks_at_the_environment() {
    let looks = |s: &Source| s.code.contains("std::env") || s.code.contains("env::");
    let found: Vec<String> =
        sources().into_iter().filter(|s| s.path.starts_with("src/") && looks(s)).map(|s| s.path).collect();
    assert_eq!(found, ENVIRONMENT);
}

#[test]
fn arithmetic_and_policy_touch_no_file() {
    for source in sources() {
        let apart = ["src/kernels/", "src/ops/", "src/forward/", "src/store/", "src/engine/", "src/meter.rs"];
        if apart.iter().any(|dir| source.path.starts_with(dir)) {
            // On which core a thread is, nothing else tells.
            let code = source.code.replace("libc::sched_getcpu()", "");
            for word in ["std::fs", "File::open", "std::process", "println!", "libc::"] {
                assert!(!code.contains(word), "{} uses {word}", source.path);
            }
        }
    }
}

#[test]
fn unsafe_code_is_where_the_list_says() {
    let (mut with_unsafe, mut with_permission) = (vec![], vec![]);
    for source in sources() {
        if source.code.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == "unsafe") {
            with_unsafe.push(source.path.clone());
        }
        if source.code.contains("allow(unsafe_code)") {
            with_permission.push(source.path);
        }
    }
    let sorted = |mut list: Vec<String>| {
        list.sort();
        list
    };
    assert_eq!(sorted(with_permission), UNSAFE, "files with a permission");
    assert_eq!(sorted(with_unsafe), UNSAFE, "files with unsafe code");
}

#[test]
fn bounds_have_one_place() {
    // Kernels keep the sizes of their own tiles; everything else is in limits.rs, where bounds are held against each
    // other. A name that ends in DEFAULT is no bound.
    let mut faults = vec![];
    for source in sources().iter().filter(|s| s.path.starts_with("src/")) {
        if source.path == "src/limits.rs" || source.path.starts_with("src/kernels/") {
            continue;
        }
        for name in paths_after(&source.code, "const ") {
            let is_bound = name.starts_with("MAX_") || name.ends_with("_MAX") || name == "FUEL";
            if is_bound && !name.ends_with("_DEFAULT") {
                faults.push(format!("{}: {name} belongs in src/limits.rs", source.path));
            }
        }
    }
    assert_none(faults);
}

#[test]
fn no_file_is_longer_than_a_thousand_lines() {
    let mut files = vec![];
    for dir in ["src", "io", "tests", "bench"] {
        rust_files(&root().join(dir), &mut files);
    }
    for file in files {
        let lines = fs::read_to_string(&file).unwrap().lines().count();
        assert!(lines <= LINES_MAX, "{} has {lines} lines", file.display());
    }
}

#[test]
fn values_are_unwrapped_only_where_the_list_says() {
    let mut found = BTreeMap::new();
    for source in sources() {
        let count = [".unwrap()", ".expect(", ".unwrap_err()", ".expect_err("]
            .iter()
            .map(|call| source.code.matches(call).count())
            .sum::<usize>();
        if count > 0 {
            found.insert(source.path, count);
        }
    }
    let allowed: BTreeMap<String, usize> = UNWRAPS.iter().map(|(path, n, _)| ((*path).to_owned(), *n)).collect();
    assert_eq!(found, allowed);
}

#[test]
fn every_source_says_what_it_is_for() {
    for source in sources() {
        if source.path.ends_with("main.rs") {
            continue;
        }
        assert!(source.text.starts_with("//!"), "{} has no description", source.path);
    }
}

#[test]
fn the_scanner_sees_what_it_should() {
    let code = strip(
        "let a = \"crate::x\"; // crate::y\nlet b = 'c'; let c: &'a u8 = b\"\\\"\"; r#\"un\"safe\"#; '\\'' /* z */",
    );
    assert_eq!(code, "let a = ; \nlet b = ; let c: &'a u8 = b; ;  ");
    let paths = crate_paths("use crate::{a, b::{c, d}, e}; crate::f::g(); other_crate::h; pub(crate) x");
    assert_eq!(paths, ["a", "b", "e", "f"]);
    assert_eq!(without_tests("a #[cfg(test)] mod t { {} } b #[cfg(test)] use c; d"), "a  b  d");
}
