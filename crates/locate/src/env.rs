//! The outside world as the searches see it; tests put another in its place.

use std::ffi::OsString;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// A Python behind a shim, on a busy machine, takes a second to start; one on a dead network drive
/// takes for ever.
const PATIENCE: Duration = Duration::from_secs(5);

/// Reads an environment variable.
type Lookup = dyn Fn(&str) -> Option<OsString>;

/// Runs a program with `--version`: what it prints, or why it prints nothing.
type AskVersion = dyn Fn(&Path) -> Result<String, String>;

/// What a search may ask. Everything slow is a closure, run only if the search gets that far.
pub(crate) struct Env {
    /// The environment variables.
    pub var: Box<Lookup>,
    /// The import path of the active Python; empty when there is none.
    pub python_path: Box<dyn Fn() -> Vec<PathBuf>>,
    /// What `ldconfig -p` prints; empty when there is none.
    pub ldconfig: Box<dyn Fn() -> String>,
    /// The system's prefixes, `/usr` and such.
    pub prefixes: Vec<PathBuf>,
    /// The version of a program.
    pub version_of: Box<AskVersion>,
    /// The running program's file.
    pub program: Option<PathBuf>,
}

impl Env {
    /// The process's own environment.
    pub fn real() -> Self {
        Self {
            var: Box::new(|name| std::env::var_os(name)),
            python_path: Box::new(python_path),
            ldconfig: Box::new(|| {
                // Plain users often have no sbin on their PATH.
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

    /// A machine that has nothing.
    #[cfg(test)]
    pub fn nothing() -> Self {
        Self {
            var: Box::new(|_| None),
            python_path: Box::new(Vec::new),
            ldconfig: Box::new(String::new),
            prefixes: Vec::new(),
            version_of: Box::new(|_| Err("it does not run".to_owned())),
            program: None,
        }
    }

    /// A variable naming a path; unset and empty are the same.
    pub fn path_var(&self, name: &str) -> Option<PathBuf> {
        (self.var)(name).filter(|value| !value.is_empty()).map(PathBuf::from)
    }

    /// The folders of a variable such as `PATH`.
    pub fn path_list(&self, name: &str) -> Vec<PathBuf> {
        let list = (self.var)(name).unwrap_or_default();
        std::env::split_paths(&list).filter(|path| !path.as_os_str().is_empty()).collect()
    }

    /// Where the active Python keeps packages: those of `VIRTUAL_ENV`, which need no Python to be
    /// named, then the import path that the interpreter on `PATH` reports.
    pub fn site_packages(&self) -> Vec<PathBuf> {
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

/// The import path of the active Python, asked once a process.
fn python_path() -> Vec<PathBuf> {
    static PATH: OnceLock<Vec<PathBuf>> = OnceLock::new();
    let ask = || {
        // The current folder leads the path of `-c` programs as an empty entry: it is no place for
        // packages.
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
    PATH.get_or_init(ask).clone()
}

/// What a program prints, or why it printed nothing: it does not start, it fails, it is late.
fn output(command: &mut Command) -> Result<String, String> {
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| format!("it cannot be run: {error}"))?;
    let deadline = Instant::now() + PATIENCE;
    let status = loop {
        match child.try_wait().map_err(|error| error.to_string())? {
            Some(status) => break status,
            None if Instant::now() > deadline => {
                // It may have ended in between; either way nobody waits for its answer any more.
                let _ = child.kill();
                let _ = child.wait();
                return Err(format!("it gave no answer within {} s", PATIENCE.as_secs()));
            }
            None => std::thread::sleep(Duration::from_millis(2)),
        }
    };
    if !status.success() {
        return Err(format!("it failed ({status})"));
    }
    let mut text = String::new();
    let mut stdout = child.stdout.take().ok_or("its output was not piped")?;
    stdout.read_to_string(&mut text).map_err(|error| error.to_string())?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_is_missing_or_fails_is_a_reason_not_a_panic() {
        assert!(
            output(&mut Command::new("/nonexistent/python3"))
                .unwrap_err()
                .contains("cannot be run")
        );
        assert!(output(&mut Command::new("false")).unwrap_err().contains("it failed"));
        assert_eq!(output(Command::new("echo").arg("hello")).unwrap(), "hello\n");
    }
}
