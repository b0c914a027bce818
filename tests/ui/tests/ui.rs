//! Tests that wrong uses of the crates do not compile, and that the message says why.
//!
//! Each case is a program, compiled alone against the libraries that cargo has built. The expected
//! messages are in `*.stderr`; with `DEVCOMM_BLESS=1` the test writes them.

use std::env;
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use cargo_metadata::Message;
use libtest_mimic::{Arguments, Completion, Failed, Trial};

/// The compiler whose messages are in `*.stderr`; the messages of other versions differ.
const COMPILER: &str = "rustc 1.95.";

const FOLDERS: [&str; 3] = ["cuda_std", "nccl_device", "host"];
const CRATES: [&str; 5] =
    ["cuda_std", "devcomm_host", "devcomm_kernels", "devcomm_types", "nccl_device"];

fn main() -> Result<(), Box<dyn Error>> {
    env::set_current_dir(env!("CARGO_MANIFEST_DIR"))?;
    let version = Command::new(rustc()).arg("--version").output()?.stdout;
    let version = String::from_utf8_lossy(&version).trim().to_owned();
    let tests = if version.starts_with(COMPILER) {
        let libraries = libraries()?;
        let test = |case: PathBuf| {
            let (name, libraries) = (case.display().to_string(), libraries.clone());
            Trial::test(name, move || check_refusal(&case, &libraries))
        };
        cases()?.into_iter().map(test).collect()
    } else {
        let reason = format!("SKIPPED: the messages are those of {COMPILER}x, this is {version}");
        let skip = || Ok(Completion::ignored_with(reason));
        vec![Trial::ignorable_test("wrong_uses_do_not_compile", skip)]
    };
    libtest_mimic::run(&Arguments::from_args(), tests).exit()
}

fn rustc() -> PathBuf {
    env::var_os("RUSTC").map_or_else(|| "rustc".into(), PathBuf::from)
}

fn cases() -> Result<Vec<PathBuf>, Box<dyn Error>> {
    let mut cases = Vec::new();
    for folder in FOLDERS {
        for entry in fs::read_dir(folder)? {
            cases.push(entry?.path());
        }
    }
    cases.retain(|path| path.extension().is_some_and(|extension| extension == "rs"));
    cases.sort();
    Ok(cases)
}

/// Returns the options that name the libraries. Cargo has built them for this package already.
fn libraries() -> Result<Vec<String>, Box<dyn Error>> {
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["build", "--lib", "--message-format=json-render-diagnostics", "--quiet"])
        .stderr(Stdio::inherit())
        .output()?;
    let mut options = Vec::new();
    for message in Message::parse_stream(&output.stdout[..]) {
        let Message::CompilerArtifact(artifact) = message? else { continue };
        let library = artifact.filenames.iter().find(|file| file.extension() == Some("rlib"));
        let name = artifact.target.name;
        if let Some(library) = library.filter(|_| CRATES.contains(&name.as_str())) {
            let folder = library.parent().ok_or("a library without a folder")?;
            options.push(format!("-Ldependency={folder}"));
            options.push(format!("--extern={name}={library}"));
        }
    }
    if options.len() == 2 * CRATES.len() {
        return Ok(options);
    }
    Err(format!("cargo has not built all of {CRATES:?}, but {options:?}").into())
}

fn check_refusal(case: &Path, libraries: &[String]) -> Result<(), Failed> {
    let output = Command::new(rustc())
        .args(["--edition=2024", "--crate-type=bin", "--emit=metadata", "--out-dir"])
        .arg(env!("CARGO_TARGET_TMPDIR"))
        .args(["--verbose", "-Adead_code", "--color=never", "--diagnostic-width=140"])
        .args(libraries)
        .arg(case)
        .output()?;
    if output.status.success() {
        return Err("it compiles".into());
    }
    let found = portable(&String::from_utf8(output.stderr)?, &case.to_string_lossy());
    let file = case.with_extension("stderr");
    if env::var_os("DEVCOMM_BLESS").is_some() {
        return Ok(fs::write(file, found)?);
    }
    let expected = fs::read_to_string(file)?;
    if found == expected {
        return Ok(());
    }
    Err(format!("expected:\n{expected}\nfound:\n{found}").into())
}

/// Returns the messages without the parts that depend on the system or on other sources than the
/// case: lines of the crates, and the folder of the standard library.
fn portable(messages: &str, case: &str) -> String {
    let mut text = String::new();
    for line in messages.lines().take_while(|line| !line.starts_with("error: aborting due to ")) {
        let arrow = line.find("--> ").or_else(|| line.find("::: "));
        let (before, place) = line.split_at(arrow.map_or(line.len(), |arrow| arrow + 4));
        let place = match place.split_once("/library/") {
            Some((_, standard)) => format!("$RUST/{standard}"),
            None if place.starts_with(case) => place.to_owned(),
            None => place.split(':').next().unwrap_or_default().to_owned(),
        };
        text += &format!("{before}{place}\n");
    }
    text.trim_end().to_owned() + "\n"
}
