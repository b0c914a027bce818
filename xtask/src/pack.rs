//! `cargo xtask pack`: a folder that runs examples and GPU tests on a machine with GPUs, but with
//! no Rust, no network and an older NCCL.
//!
//! ```text
//! run.sh      ./run.sh list | tests | bench ... | EXAMPLE [ARGS...]
//! examples/   the programs                tests/   the test programs that need GPUs
//! bench/      devcomm-bench               twins/   kernels compiled from Rust and from C++, for it
//! kernels/    PTX, cubins, sidecars       nccl/    lib/libnccl.so.2 (or .xz) and include/nccl.h
//! lib/        the plugin of GinLoopback   licences/   the project's and NCCL's
//! ```

use std::fs::{self, File};
use std::io::BufReader;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use cargo_metadata::camino::Utf8PathBuf;
use cargo_metadata::{Message, TargetKind};
use devcomm_locate::{NcclTree, NcclVersion};
use libloading::Library;
use tempfile::TempDir;

use crate::project::{EXAMPLES_PACKAGE, Project, cargo, root};
use crate::setup::{NCCL_VERSION, Without, find_pinned_nccl, setup};
use crate::{cpp, slim, twins};

const RUN_SH: &str = include_str!("pack_run.sh");
/// The package of the benchmarks.
const BENCH_PACKAGE: &str = "devcomm-bench";
/// A file of every pack. Only a folder that has it, or is empty, is replaced.
const MARKER: &str = ".made-by-cargo-xtask-pack";
const MIB: u64 = 1 << 20;

/// Reads `64M`, `500K`, `2G` or a number of bytes.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let (number, factor) = match text.strip_suffix(['K', 'M', 'G']) {
        Some(number) if text.ends_with('K') => (number, 1 << 10),
        Some(number) if text.ends_with('M') => (number, MIB),
        Some(number) => (number, 1 << 30),
        None => (text, 1),
    };
    let size = number.parse::<u64>().ok().and_then(|number| number.checked_mul(factor));
    size.ok_or_else(|| format!("{text:?} is no size; 64M is one"))
}

/// Makes the folder `out`, or else `pack` in the checkout, and checks that it holds at most `limit`
/// bytes. With `slim`, NCCL's library is cut to that architecture and compressed.
pub fn pack(limit: u64, slim: Option<u32>, out: Option<&Path>) -> Result<()> {
    let out = match out {
        Some(out) => std::path::absolute(out)?,
        None => root().join("pack"),
    };
    ensure_replaceable(&out)?;
    setup(true, Without::Ptxas)?;
    let tree = find_pinned_nccl()?;

    // Made under another name: a pack that fails leaves the last one as it was, and nothing else.
    let scratch = scratch_beside(&out)?;
    let partial = scratch.path().join("pack");
    let project = Project::open()?;
    copy_programs(&project, &partial)?;
    copy_twins(&partial.join("twins"))?;
    copy_cpp(&partial.join("examples"))?;
    copy_licences(&tree, &partial.join("licences"))?;
    copy_nccl(&tree, slim, &partial.join("nccl"))?;
    fs::write(partial.join(MARKER), "")?;
    fs::write(partial.join("run.sh"), RUN_SH)?;
    fs::set_permissions(partial.join("run.sh"), fs::Permissions::from_mode(0o755))?;

    let files = files_by_size(&partial)?;
    let total: u64 = files.iter().map(|(size, _)| size).sum();
    if total > limit {
        let biggest = files.iter().take(5).map(|(size, path)| {
            format!(
                "\n  {:>8}  {}",
                mib(*size),
                path.strip_prefix(&partial).unwrap_or(path).display()
            )
        });
        let biggest: String = biggest.collect();
        let advice = if slim.is_none() {
            "\n`--slim sm_90` cuts NCCL's library to one architecture"
        } else {
            ""
        };
        bail!(
            "the folder would hold {}, the limit is {}; its biggest files:{biggest}{advice}",
            mib(total),
            mib(limit)
        );
    }
    if out.exists() {
        fs::remove_dir_all(&out).with_context(|| format!("cannot remove {}", out.display()))?;
    }
    fs::rename(&partial, &out).with_context(|| format!("cannot create {}", out.display()))?;
    println!(
        "{}: {} in {} files; start with ./run.sh list",
        out.display(),
        mib(total),
        files.len()
    );
    Ok(())
}

/// Refuses to replace a folder that no pack made.
fn ensure_replaceable(out: &Path) -> Result<()> {
    let replaceable = !out.exists()
        || out.join(MARKER).is_file()
        || fs::read_dir(out).is_ok_and(|mut entries| entries.next().is_none());
    ensure!(
        replaceable,
        "{} is there and no pack made it ({MARKER} is not in it); remove it or choose another --out",
        out.display()
    );
    Ok(())
}

/// A folder on the disk of `out`, from where a finished pack can be moved there in one step.
fn scratch_beside(out: &Path) -> Result<TempDir> {
    let parent = out.parent().with_context(|| format!("{} cannot be a pack", out.display()))?;
    fs::create_dir_all(parent).with_context(|| format!("cannot create {}", parent.display()))?;
    tempfile::Builder::new()
        .prefix(".devcomm-pack-")
        .tempdir_in(parent)
        .with_context(|| format!("cannot create a folder in {}", parent.display()))
}

/// Builds the examples and the GPU tests, and copies them and the kernels that they hold.
fn copy_programs(project: &Project, pack: &Path) -> Result<()> {
    let mut made = Made::default();
    let bins = ["build".to_owned(), "--bins".to_owned()];
    let examples = pack.join("examples");
    build(project, EXAMPLES_PACKAGE, &bins, &TargetKind::Bin, &examples, &mut made)?;
    build(project, BENCH_PACKAGE, &bins, &TargetKind::Bin, &pack.join("bench"), &mut made)?;

    for (package, names) in project.gpu_tests() {
        let mut tests = vec!["test".to_owned(), "--no-run".to_owned()];
        tests.extend(names.into_iter().flat_map(|name| ["--test".to_owned(), name]));
        build(project, &package, &tests, &TargetKind::Test, &pack.join("tests"), &mut made)?;
    }

    let plugin = made.plugin.context("no program was built with the plugin of GinLoopback")?;
    fs::create_dir_all(pack.join("lib"))?;
    fs::copy(plugin, pack.join("lib/libdevcomm_rma_loopback.so"))?;
    fs::write(pack.join("lib/network.sh"), network_sh())?;
    let kernels = made.kernels.context("the build script of the root package made no kernels")?;
    let target = pack.join("kernels");
    fs::create_dir_all(&target)?;
    for entry in
        fs::read_dir(&kernels).with_context(|| format!("cannot read {}", kernels.display()))?
    {
        let path = entry?.path();
        let wanted = path
            .extension()
            .is_some_and(|kind| ["ptx", "json", "cubin"].iter().any(|k| kind == *k));
        if let (true, Some(name)) = (wanted, path.file_name()) {
            fs::copy(&path, target.join(name))?;
        }
    }
    Ok(())
}

/// What run.sh sets for GIN without a network card; it names the pack's folder `here`.
fn network_sh() -> String {
    let plugin = Path::new("$here/lib/libdevcomm_rma_loopback.so");
    let variables = devcomm_locate::gin_loopback_environment(plugin);
    variables.map(|(name, value)| format!("export {name}=\"{value}\"\n")).concat()
}

/// What builds make besides programs.
#[derive(Default)]
struct Made {
    /// The folder of the kernels.
    kernels: Option<PathBuf>,
    /// The shared library that NCCL loads for GIN without a network card.
    plugin: Option<PathBuf>,
}

/// Runs cargo and copies the programs of `kind` that it reports; notes what else was made.
fn build(
    project: &Project,
    package: &str,
    select: &[String],
    kind: &TargetKind,
    target: &Path,
    made: &mut Made,
) -> Result<()> {
    fs::create_dir_all(target)?;
    let mut child = cargo()
        .args(select)
        .args([
            "--release",
            "--features",
            "ptx",
            "--package",
            package,
            "--message-format=json-render-diagnostics",
        ])
        .args(["--config", "profile.release.strip=\"symbols\""])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("cargo does not start")?;
    let stdout = child.stdout.take().context("cargo's output was not piped")?;
    for message in Message::parse_stream(BufReader::new(stdout)) {
        match message? {
            Message::CompilerArtifact(artifact) if artifact.target.kind.contains(kind) => {
                if let Some(program) = artifact.executable {
                    fs::copy(&program, target.join(&artifact.target.name))?;
                }
            }
            Message::CompilerArtifact(artifact)
                if artifact.target.kind.contains(&TargetKind::CDyLib) =>
            {
                let shared = |path: &&Utf8PathBuf| path.extension() == Some("so");
                made.plugin = artifact.filenames.iter().find(shared).map(PathBuf::from);
            }
            Message::BuildScriptExecuted(script) if project.is_root(&script.package_id) => {
                made.kernels = Some(script.out_dir.join("kernels").into());
            }
            _ => {}
        }
    }
    ensure!(child.wait()?.success(), "cargo {} failed, see above", select.join(" "));
    Ok(())
}

/// Compiles the twins and copies what the benchmark loads. A pack without them is better than none.
fn copy_twins(target: &Path) -> Result<()> {
    let folder = match twins::build() {
        Ok(twins) => twins.folder,
        Err(error) => {
            eprintln!("warning: going on without the C++ twins: {error:#}");
            return Ok(());
        }
    };
    for side in ["rust", "cpp"] {
        fs::create_dir_all(target.join(side))?;
        for entry in fs::read_dir(folder.join(side))? {
            let path = entry?.path();
            let wanted = path.extension().is_some_and(|kind| kind == "cubin" || kind == "json");
            if let (true, Some(name)) = (wanted, path.file_name()) {
                fs::copy(&path, target.join(side).join(name))?;
            }
        }
    }
    Ok(())
}

/// Compiles the programs in C++ and copies them, as `cpp_NAME`. A pack without them is better than none.
fn copy_cpp(target: &Path) -> Result<()> {
    let programs = match cpp::build() {
        Ok(programs) => programs,
        Err(error) => {
            eprintln!("warning: going on without the programs in C++: {error:#}");
            return Ok(());
        }
    };
    for program in programs {
        let name = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
        fs::copy(&program, target.join(format!("cpp_{name}")))?;
    }
    Ok(())
}

fn copy_licences(tree: &NcclTree, target: &Path) -> Result<()> {
    fs::create_dir_all(target)?;
    for name in ["LICENSE-APACHE", "LICENSE-MIT", "THIRD_PARTY_NOTICES"] {
        fs::copy(root().join(name), target.join(name))
            .with_context(|| format!("cannot copy {name}"))?;
    }
    let licence = nccl_licence(tree).with_context(|| {
        format!("no licence of NCCL was found around {}; pack from its wheel", tree.root.display())
    })?;
    fs::copy(licence, target.join("NCCL-LICENSE.txt"))?;
    Ok(())
}

/// NCCL's licence: in a wheel it is beside the package, in `*.dist-info`; other trees hold it
/// themselves.
fn nccl_licence(tree: &NcclTree) -> Option<PathBuf> {
    let beside = tree.root.parent().and_then(Path::parent).and_then(|site| fs::read_dir(site).ok());
    let infos = beside.into_iter().flatten().flatten().map(|entry| entry.path()).filter(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        name.starts_with("nvidia_nccl") && name.ends_with(".dist-info")
    });
    let folders = infos.flat_map(|info| [info.join("licenses"), info]).chain([tree.root.clone()]);
    folders
        .filter_map(|folder| fs::read_dir(folder).ok())
        .flat_map(|entries| entries.flatten().map(|entry| entry.path()))
        .find(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
            path.is_file() && (name.starts_with("license") || name.starts_with("copying"))
        })
}

fn copy_nccl(tree: &NcclTree, slim: Option<u32>, target: &Path) -> Result<()> {
    let library = tree.library.as_deref().context("NCCL's tree lost its library")?;
    let include = tree.include.as_deref().context("NCCL's tree lost its headers")?;
    let lib = target.join("lib");
    fs::create_dir_all(&lib)?;
    fs::create_dir_all(target.join("include"))?;
    fs::copy(include.join("nccl.h"), target.join("include/nccl.h"))?;
    let copy = lib.join("libnccl.so.2");
    let Some(arch) = slim else {
        fs::copy(library, copy)?;
        return Ok(());
    };
    println!("cutting NCCL's library to sm_{arch} ...");
    let mut image = fs::read(library)?;
    slim::slim(&mut image, arch).with_context(|| format!("cannot cut {}", library.display()))?;
    fs::write(&copy, &image)?;
    let version = version_of_library(&copy).context("the cut library does not work")?;
    ensure!(version == NCCL_VERSION, "the cut library says it is NCCL {version}");
    compress(&copy, &lib.join("libnccl.so.2.xz"))?;
    fs::remove_file(copy)?;
    Ok(())
}

/// Loads NCCL's library and asks for its version.
fn version_of_library(path: &Path) -> Result<NcclVersion> {
    let mut code = 0;
    // SAFETY: loading NCCL runs its initialisers, which start nothing before the first
    // communicator; the function is NCCL's `ncclResult_t ncclGetVersion(int *)`, and the pointer is
    // to a live int.
    let result = unsafe {
        let library = Library::new(path)?;
        let get_version = library.get::<unsafe extern "C" fn(*mut i32) -> i32>("ncclGetVersion")?;
        get_version(&raw mut code)
    };
    ensure!(result == 0, "ncclGetVersion failed with code {result}");
    Ok(NcclVersion::from_code(u32::try_from(code)?))
}

/// Compresses a file to `target`: with `xz`, on all cores, or else with Python's lzma.
fn compress(file: &Path, target: &Path) -> Result<()> {
    let lzma = "import lzma, shutil, sys; packed = lzma.open(sys.stdout.buffer, 'wb'); \
                shutil.copyfileobj(sys.stdin.buffer, packed, 1 << 20); packed.close()";
    for (program, args) in [("xz", ["-6", "-cT0"]), ("python3", ["-c", lzma])] {
        let status = Command::new(program)
            .args(args)
            .stdin(File::open(file)?)
            .stdout(File::create(target)?)
            .status();
        match status {
            Ok(status) if status.success() => return Ok(()),
            Ok(status) => bail!("{program} ended with {status} on {}", file.display()),
            // Not installed: the next one.
            Err(_) => {}
        }
    }
    bail!("compressing NCCL's library needs xz or python3, and neither starts")
}

/// The files under `folder`, biggest first.
fn files_by_size(folder: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let mut files = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                folders.push(entry.path());
            } else {
                files.push((entry.metadata()?.len(), entry.path()));
            }
        }
    }
    files.sort_by(|a, b| b.cmp(a));
    Ok(files)
}

fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / MIB as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_their_units() {
        assert_eq!(parse_size("64M"), Ok(64 * MIB));
        assert_eq!(parse_size("1G"), Ok(1024 * MIB));
        assert_eq!(parse_size("512K"), Ok(MIB / 2));
        assert_eq!(parse_size("100"), Ok(100));
        for bad in ["", "M", "64MB", "-1", "99999999999999G"] {
            parse_size(bad).unwrap_err();
        }
    }

    #[test]
    fn a_pack_s_network_is_the_plugin_in_it() {
        let script = format!("here='/a pack'\n{}env", network_sh());
        let output = Command::new("sh").args(["-c", &script]).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let text = String::from_utf8(output.stdout).unwrap();
        let plugin = Path::new("/a pack/lib/libdevcomm_rma_loopback.so");
        for (name, value) in devcomm_locate::gin_loopback_environment(plugin) {
            let line = format!("{name}={value}");
            assert!(text.lines().any(|found| found == line), "{line} is not in:\n{text}");
        }
    }

    #[test]
    fn a_folder_that_no_pack_made_is_not_replaced() {
        let folder = tempfile::tempdir().unwrap();
        ensure_replaceable(&folder.path().join("new")).unwrap();
        ensure_replaceable(folder.path()).unwrap();
        fs::write(folder.path().join("thesis.tex"), "").unwrap();
        ensure_replaceable(folder.path()).unwrap_err();
        fs::write(folder.path().join(MARKER), "").unwrap();
        ensure_replaceable(folder.path()).unwrap();
    }
}
