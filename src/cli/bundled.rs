//! The model that comes with the program: where it is, and its converted copy in the user's cache.

use std::fs;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::checkpoint::convert::{Cancel, ConvertOptions, ConvertReport, convert_opened};
use crate::checkpoint::{Checkpoint, CheckpointError};

use super::machine::Machine;
use super::{Failure, interrupt, render, size};

/// Where the model lies below the source tree, the executable, or a directory above it.
const PLACE: &str = "models/glm-tales";
/// Counts changes of what a conversion with the same options writes.
const CONVERSION: u32 = 1;
/// Half-made conversions older than this belong to nobody any more.
const ABANDONED_AFTER: Duration = Duration::from_secs(3600);

/// Finds the model's checkpoint: in the source tree the program was built from, else beside the executable or above.
pub fn find(machine: &Machine) -> Result<PathBuf, Failure> {
    let source_tree = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let candidates = [source_tree].into_iter().chain(machine.executable_dirs()).map(|dir| dir.join(PLACE));
    let looked: Vec<PathBuf> = candidates.collect();
    match looked.iter().find(|dir| dir.join("config.json").is_file()) {
        Some(dir) => Ok(dir.clone()),
        None => {
            let cause = format!("{PLACE} is neither below {} nor above the executable", env!("CARGO_MANIFEST_DIR"));
            Err(Failure::usage("no model is given and the one that comes with the program is not there")
                .cause(cause)
                .hint("name a model directory with -m DIR"))
        }
    }
}

/// The int4 container of the bundled checkpoint `source`, converted into the user's cache when it is not there yet;
/// none when the conversion was interrupted.
///
/// A conversion is made in a directory of its own and renamed: whoever finds the final name finds a whole container,
/// also when two processes begin at once.
pub fn container(source: &Path, machine: &Machine, quiet: bool) -> Result<Option<Checkpoint>, Failure> {
    let source = open(source)?;
    let options = ConvertOptions::default();
    let name = container_name(&source.fingerprint_hex(), &options);
    // A container that is there is used from wherever it is, also where nothing can be written.
    for cache in candidates(machine).into_iter().filter(|cache| cache.trusted(machine)) {
        if let Ok(checkpoint) = Checkpoint::open(&cache.dir.join(&name)) {
            clear_abandoned(&cache.dir);
            return Ok(Some(checkpoint));
        }
    }
    let cache = cache_dir(machine)?;
    clear_abandoned(&cache);
    let container = cache.join(&name);
    set_aside(&container, &cache, &name, quiet)?;
    render::note(
        quiet,
        &format!("first use: converting the model that comes with the program to int4, in {}", container.display()),
    );
    let start = Instant::now();
    let scratch = scratch(&cache, &name)?;
    let Some(report) = convert_into(&source, &scratch.join("model"), options, quiet).inspect_err(|_| {
        let _ = fs::remove_dir_all(&scratch);
    })?
    else {
        let _ = fs::remove_dir_all(&scratch);
        return Ok(None);
    };
    let published = fs::rename(scratch.join("model"), &container);
    let _ = fs::remove_dir_all(&scratch);
    // Not empty: another process was quicker, and what it made is the same.
    let checkpoint = Checkpoint::open(&container).map_err(|opened| {
        let error = format!("cannot put the converted model at {}", container.display());
        let cause = published.err().map_or_else(|| opened.to_string(), |refused| refused.to_string());
        Failure::work(error).cause(cause).hint(format!("remove {}", container.display()))
    })?;
    let took = start.elapsed().as_secs_f64();
    render::note(
        quiet,
        &format!("converted in {took:.1} s, {}; later runs use it as it is", size::show(report.bytes_total)),
    );
    Ok(Some(checkpoint))
}

/// Converts until it is done or interrupted.
fn convert_into(
    source: &Checkpoint,
    made: &Path,
    options: ConvertOptions,
    quiet: bool,
) -> Result<Option<ConvertReport>, Failure> {
    let options = ConvertOptions { cancel: Some(Cancel(interrupt::watch()?)), ..options };
    let waiting = render::Waiting::begin("converting", quiet);
    let result = convert_opened(source, made, &options, &mut |_| {});
    drop(waiting);
    interrupt::unwatch();
    match result {
        Ok(report) => Ok(Some(report)),
        Err(CheckpointError::Interrupted { .. }) => {
            render::stderr(render::INTERRUPTED);
            Ok(None)
        }
        Err(e) => Err(Failure::of(&e).hint(e.hint())),
    }
}

/// Clears away whatever is at `container` and is no container: damaged, half a directory, a file.
fn set_aside(container: &Path, cache: &Path, name: &str, quiet: bool) -> Result<(), Failure> {
    if fs::symlink_metadata(container).is_err() {
        return Ok(());
    }
    // Another process may have made it anew meanwhile.
    let Err(damaged) = Checkpoint::open(container) else { return Ok(()) };
    render::note(quiet, &format!("the converted model is damaged and made anew: {damaged}"));
    let aside = scratch(cache, name)?;
    let renamed = fs::rename(container, aside.join("damaged"));
    let _ = fs::remove_dir_all(&aside);
    match renamed {
        // Another process may have renamed it first; then there is nothing to clear.
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            let what = format!("cannot clear away the damaged model in {}", container.display());
            Err(Failure::work(what).cause(error).hint(format!("remove {}", container.display())))
        }
        _ => Ok(()),
    }
}

/// Opens the model in `dir`. That it has a tokenizer is for those to see to who need one.
pub fn open(dir: &Path) -> Result<Checkpoint, Failure> {
    Checkpoint::open_without_tokenizer(dir).map_err(|e| Failure::of(&e).hint(e.hint()))
}

/// The name of a container in the cache: everything that decides its bytes, so that none of it can change under a name.
fn container_name(fingerprint: &str, options: &ConvertOptions) -> String {
    let parameters = options.parameters().replace('=', "").replace(' ', "-");
    format!("glm-tales-{fingerprint}-{parameters}-v{}-{CONVERSION}", env!("CARGO_PKG_VERSION"))
}

/// A directory that may hold converted models.
struct Cache {
    dir: PathBuf,
    /// Among the temporary files, where anybody can make the name first.
    shared: bool,
}

impl Cache {
    /// Whether what is there can only be this user's doing.
    fn trusted(&self, machine: &Machine) -> bool {
        let owned = |meta: fs::Metadata| meta.is_dir() && meta.uid() == machine.uid;
        !self.shared || fs::symlink_metadata(&self.dir).is_ok_and(owned)
    }

    fn prepare(&self, machine: &Machine) -> std::io::Result<()> {
        make_writable(&self.dir, if self.shared { 0o700 } else { 0o755 })?;
        if self.trusted(machine) { Ok(()) } else { Err(std::io::Error::other("it belongs to another user")) }
    }
}

/// `$XDG_CACHE_HOME/millstream`, where that is not set `~/.cache/millstream`, and a directory of this user among the
/// temporary files.
fn candidates(machine: &Machine) -> Vec<Cache> {
    let absolute = |name: &str| machine.variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let xdg = absolute("XDG_CACHE_HOME").map(|dir| dir.join("millstream"));
    let home = absolute("HOME").map(|dir| dir.join(".cache/millstream"));
    let own = xdg.or(home).into_iter().map(|dir| Cache { dir, shared: false });
    let temporary = machine.temp.join(format!("millstream-{}", machine.uid));
    own.chain([Cache { dir: temporary, shared: true }]).collect()
}

/// The first of the [`candidates`] that can be written.
fn cache_dir(machine: &Machine) -> Result<PathBuf, Failure> {
    let mut refused = Vec::new();
    for cache in candidates(machine) {
        match cache.prepare(machine) {
            Ok(()) => return Ok(cache.dir),
            Err(error) => refused.push(format!("{}: {error}", cache.dir.display())),
        }
    }
    Err(Failure::work("there is no directory for the converted model")
        .cause(refused.join("; "))
        .hint("set XDG_CACHE_HOME to a directory that can be written, or name a model with -m DIR"))
}

/// Makes `dir` and tries whether files can be made in it.
pub(super) fn make_writable(dir: &Path, mode: u32) -> std::io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(mode).create(dir)?;
    let probe = dir.join(format!(".probe-{}", std::process::id()));
    fs::write(&probe, b"")?;
    fs::remove_file(&probe)
}

/// A new directory beside the final one, for this process alone.
fn scratch(cache: &Path, name: &str) -> Result<PathBuf, Failure> {
    let mut error = None;
    for attempt in 0..100 {
        let dir = cache.join(format!("{name}.tmp-{}-{attempt}", std::process::id()));
        match fs::create_dir(&dir) {
            Ok(()) => return Ok(dir),
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => error = Some(e),
            Err(e) => {
                error = Some(e);
                break;
            }
        }
    }
    let failure = Failure::work(format!("cannot make a directory in {}", cache.display()));
    Err(match error {
        Some(error) => failure.cause(error),
        None => failure,
    })
}

/// Removes what killed conversions left behind.
fn clear_abandoned(cache: &Path) {
    for entry in fs::read_dir(cache).into_iter().flatten().flatten() {
        let is_scratch = entry.file_name().to_string_lossy().contains(".tmp-");
        let age = entry.metadata().and_then(|meta| meta.modified()).ok().and_then(|time| time.elapsed().ok());
        if is_scratch && age.is_some_and(|age| age > ABANDONED_AFTER) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn machine(temp: &Path, environment: &[(&str, &Path)]) -> Machine {
        let environment: BTreeMap<_, _> =
            environment.iter().map(|(name, path)| (name.to_string(), path.as_os_str().to_owned())).collect();
        Machine::read(Path::new("/"), 1, temp.to_owned(), environment)
    }

    #[test]
    fn the_cache_is_the_first_directory_that_can_be_written() {
        let root = tempfile::tempdir().unwrap();
        let (xdg, home, temp) = (root.path().join("xdg"), root.path().join("home"), root.path().join("temp"));
        fs::create_dir(&temp).unwrap();
        // A file where a directory is needed refuses even root.
        let blocked = root.path().join("file");
        fs::write(&blocked, b"").unwrap();

        let both = machine(&temp, &[("XDG_CACHE_HOME", &xdg), ("HOME", &home)]);
        assert_eq!(cache_dir(&both).unwrap(), xdg.join("millstream"));
        let relative = machine(&temp, &[("XDG_CACHE_HOME", Path::new("here")), ("HOME", &home)]);
        assert_eq!(cache_dir(&relative).unwrap(), home.join(".cache/millstream"));
        let neither = machine(&temp, &[("XDG_CACHE_HOME", &blocked), ("HOME", &blocked)]);
        let own = temp.join(format!("millstream-{}", neither.uid));
        assert_eq!(cache_dir(&neither).unwrap(), own);
        assert_eq!(fs::metadata(&own).unwrap().mode() & 0o777, 0o700);
        let nothing = machine(&blocked, &[("HOME", &blocked)]);
        let failure = cache_dir(&nothing).unwrap_err();
        assert!(failure.hint.unwrap().contains("XDG_CACHE_HOME"));
    }

    #[test]
    fn a_temporary_directory_that_is_a_link_is_not_used() {
        let root = tempfile::tempdir().unwrap();
        let elsewhere = root.path().join("elsewhere");
        fs::create_dir(&elsewhere).unwrap();
        let machine = machine(root.path(), &[]);
        std::os::unix::fs::symlink(&elsewhere, root.path().join(format!("millstream-{}", machine.uid))).unwrap();
        assert!(cache_dir(&machine).is_err());
    }

    #[test]
    fn another_option_is_another_name_in_the_cache() {
        use crate::checkpoint::convert::Width;
        let default = ConvertOptions::default();
        let names = [
            container_name("0", &default),
            container_name("1", &default),
            container_name("0", &ConvertOptions { experts: Width::Bits2, ..default.clone() }),
            container_name("0", &ConvertOptions { dense: Width::Bits4, ..default.clone() }),
            container_name("0", &ConvertOptions { io_bits: Width::Bits4, ..default.clone() }),
            container_name("0", &ConvertOptions { mtp: Width::Bits4, ..default.clone() }),
            container_name("0", &ConvertOptions { indexer: Width::Bits4, ..default.clone() }),
            container_name("0", &ConvertOptions { group: Some(64), ..default.clone() }),
            container_name("0", &ConvertOptions { repack: true, ..default }),
        ];
        let distinct: std::collections::BTreeSet<&String> = names.iter().collect();
        assert_eq!(distinct.len(), names.len(), "{names:?}");
        let safe = |c: char| c.is_ascii_alphanumeric() || "-.".contains(c);
        assert!(names.iter().all(|name| name.chars().all(safe) && name.len() < 128), "{names:?}");
    }

    #[test]
    fn only_abandoned_conversions_are_cleared() {
        let cache = tempfile::tempdir().unwrap();
        let name = "glm-tales-0";
        let (mine, other) = (scratch(cache.path(), name).unwrap(), scratch(cache.path(), name).unwrap());
        assert_ne!(mine, other);
        let old = std::time::SystemTime::now() - Duration::from_secs(7200);
        fs::File::open(&other).unwrap().set_modified(old).unwrap();
        clear_abandoned(cache.path());
        assert!(mine.is_dir() && !other.exists());
    }

    #[test]
    fn the_source_tree_has_the_model() {
        let machine = machine(Path::new("/tmp"), &[]);
        assert!(find(&machine).unwrap().join("MODEL_CARD.md").is_file());
    }
}
