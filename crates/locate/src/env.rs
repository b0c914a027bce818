//! The variables, programs and folders of the system that searches read, replaceable in tests.

use std::ffi::OsString;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Time limit of a program. On a busy machine Python can take a second to start through a version
/// manager; from an unreachable network drive it never starts.
const PROGRAM_TIMEOUT: Duration = Duration::from_secs(5);

/// A function that reads an environment variable.
type Lookup = dyn Fn(&str) -> Option<OsString>;

/// A function that runs a program with `--version`, and returns its output or why there is none.
type VersionOf = dyn Fn(&Path) -> Result<String, String>;

/// The environment of a search. Slow queries are closures, run only if needed.
pub(crate) struct Env {
    /// Reads an environment variable.
    pub var: Box<Lookup>,
    /// The import path of the Python that runs this process; `None` in another program.
    pub own_python: Option<Vec<PathBuf>>,
    /// The import path of the active Python; empty without Python.
    pub python_path: Box<dyn Fn() -> Vec<PathBuf>>,
    /// Output of `ldconfig -p`; empty without it.
    pub ldconfig: Box<dyn Fn() -> String>,
    /// The system's installation prefixes, such as `/usr`.
    pub prefixes: Vec<PathBuf>,
    /// Runs a program with `--version`.
    pub version_of: Box<VersionOf>,
    /// The path of the running executable.
    pub program: Option<PathBuf>,
}

impl Env {
    /// Returns the environment of this process.
    pub fn real() -> Self {
        Self {
            var: Box::new(|name| std::env::var_os(name)),
            own_python: OWN_PYTHON.get().cloned(),
            python_path: Box::new(python_path),
            ldconfig: Box::new(|| {
                // Unprivileged users often have no sbin on their PATH.
                ["ldconfig", "/sbin/ldconfig"]
                    .into_iter()
                    .find_map(|program| output(Command::new(program).arg("-p")).ok())
                    .unwrap_or_default()
            }),
            prefixes: vec!["/usr/local".into(), "/usr".into()],
            version_of: Box::new(|program| output(Command::new(program).arg("--version"))),
            program: std::env::current_exe().ok(),
        }
    }

    /// Returns an empty environment.
    #[cfg(test)]
    pub fn empty() -> Self {
        Self {
            var: Box::new(|_| None),
            own_python: None,
            python_path: Box::new(Vec::new),
            ldconfig: Box::new(String::new),
            prefixes: Vec::new(),
            version_of: Box::new(|_| Err("it does not run".to_owned())),
            program: None,
        }
    }

    /// Returns a variable with a path; empty counts as unset.
    pub fn path_var(&self, name: &str) -> Option<PathBuf> {
        (self.var)(name).filter(|value| !value.is_empty()).map(PathBuf::from)
    }

    /// Returns the folders of a variable such as `PATH`.
    pub fn path_list(&self, name: &str) -> Vec<PathBuf> {
        let list = (self.var)(name).unwrap_or_default();
        std::env::split_paths(&list).filter(|path| !path.as_os_str().is_empty()).collect()
    }

    /// Returns the active Python's site-packages: if this process is Python, its own import path;
    /// else those of `VIRTUAL_ENV`, which need no interpreter, then the import path of the
    /// interpreter on `PATH`.
    pub fn site_packages(&self) -> Vec<PathBuf> {
        if let Some(own) = &self.own_python {
            return own.clone();
        }
        let mut all = Vec::new();
        if let Some(venv) = self.path_var("VIRTUAL_ENV") {
            let versions = std::fs::read_dir(venv.join("lib")).into_iter().flatten();
            all.extend(
                versions
                    .filter_map(|entry| Some(entry.ok()?.path().join("site-packages")))
                    .filter(|path| path.is_dir()),
            );
        }
        for path in (self.python_path)() {
            if !all.contains(&path) {
                all.push(path);
            }
        }
        all
    }
}

/// The import path of the Python that runs this process.
static OWN_PYTHON: OnceLock<Vec<PathBuf>> = OnceLock::new();

/// Records that a Python interpreter runs this process, with its import path (`sys.path`). Later
/// searches look there for wheels, and not in the environment of `VIRTUAL_ENV` or of the `python3`
/// on `PATH`, which may be another one. Only the first call counts.
pub fn run_by_python(import_path: impl IntoIterator<Item = PathBuf>) {
    // Entries may be archives, or name no file.
    OWN_PYTHON.get_or_init(|| import_path.into_iter().filter(|path| path.is_dir()).collect());
}

/// Returns the import path of the active Python, queried once per process.
fn python_path() -> Vec<PathBuf> {
    static PATH: OnceLock<Vec<PathBuf>> = OnceLock::new();
    let query = || {
        // The import path of `-c` programs starts with the current folder, as an empty entry, which
        // is skipped.
        let program = "import sys; print('\\n'.join(p for p in sys.path if p))";
        ["python3", "python"]
            .into_iter()
            .find_map(|python| output(Command::new(python).args(["-c", program])).ok())
            .unwrap_or_default()
            .lines()
            .map(PathBuf::from)
            .filter(|path| path.is_dir())
            .collect()
    };
    PATH.get_or_init(query).clone()
}

/// Returns a program's output, or why there is none: it does not start, fails or times out.
fn output(command: &mut Command) -> Result<String, String> {
    output_within(PROGRAM_TIMEOUT, command)
}

fn output_within(limit: Duration, command: &mut Command) -> Result<String, String> {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| format!("it cannot be run: {error}"))?;
    let deadline = Instant::now() + limit;
    let pipe = child.stdout.take().ok_or("its output was not piped")?;
    let ended = read_within(limit, pipe).and_then(|text| {
        // The program may go on without output.
        while Instant::now() < deadline {
            if let Some(status) = child.try_wait().map_err(|error| error.to_string())? {
                return Ok((status, text));
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Err(too_late(limit))
    });
    match ended {
        Ok((status, text)) if status.success() => Ok(text),
        Ok((status, _)) => Err(format!("it failed ({status})")),
        Err(why) => {
            // Both fail if the program has just ended; its output is no longer needed.
            let _ = child.kill();
            let _ = child.wait();
            Err(why)
        }
    }
}

fn too_late(limit: Duration) -> String {
    format!("it did not end within {} s", limit.as_secs_f32())
}

/// Reads until the writers have closed the pipe: a program waits for its reader when the pipe is
/// full.
fn read_within(limit: Duration, mut pipe: ChildStdout) -> Result<String, String> {
    let (send, receive) = std::sync::mpsc::channel();
    // The thread ends when the pipe is closed; nothing waits for it after the limit.
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let read = pipe.read_to_end(&mut bytes).map(|_| bytes);
        // An error means that the limit has passed.
        let _ = send.send(read);
    });
    match receive.recv_timeout(limit) {
        Ok(Ok(bytes)) => String::from_utf8(bytes).map_err(|error| error.to_string()),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err(too_late(limit)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_is_python_looks_in_its_own_packages_only() {
        let root = tempfile::tempdir().unwrap();
        let venv = root.path().join("venv");
        let of_venv = venv.join("lib/python3.12/site-packages");
        std::fs::create_dir_all(&of_venv).unwrap();
        let var = move |name: &str| (name == "VIRTUAL_ENV").then(|| venv.clone().into());
        let on_path = || vec![PathBuf::from("/usr/lib/python3/dist-packages")];
        let env = Env { var: Box::new(var), python_path: Box::new(on_path), ..Env::empty() };
        assert_eq!(env.site_packages(), [vec![of_venv], on_path()].concat());
        let own = vec![PathBuf::from("/opt/env/lib/python3.13/site-packages")];
        let env = Env { own_python: Some(own.clone()), ..env };
        assert_eq!(env.site_packages(), own);
    }

    #[test]
    fn a_program_that_is_missing_or_fails_is_a_reason_not_a_panic() {
        assert!(
            output(&mut Command::new("/nonexistent/python3"))
                .unwrap_err()
                .contains("cannot be run")
        );
        assert!(output(&mut Command::new("false")).unwrap_err().contains("it failed"));
        assert_eq!(output(Command::new("echo").arg("hello")).unwrap(), "hello\n");
        let limit = Duration::from_millis(100);
        for script in ["exec sleep 60", "exec sleep 60 >&-"] {
            let slow = output_within(limit, Command::new("sh").args(["-c", script]));
            assert_eq!(slow.unwrap_err(), "it did not end within 0.1 s", "{script}");
        }
    }

    #[test]
    fn output_of_any_length_is_read() {
        // More than a pipe holds, as `ldconfig -p` with thousands of libraries.
        let mut long = Command::new("head");
        assert_eq!(output(long.args(["-c", "1000000", "/dev/zero"])).unwrap().len(), 1_000_000);
    }
}
