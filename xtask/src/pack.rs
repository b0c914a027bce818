//! `cargo xtask pack`: makes a folder that runs examples and GPU tests on a system with GPUs,
//! without Rust, network or a recent NCCL.
//!
//! ```text
//! run.sh           ./run.sh list | tests | bench ... | python ... | EXAMPLE [ARGS...]
//! programs.tar.xz  unpacked once by run.sh into the user's cache:
//!     examples/    the programs              tests/   the test programs that need GPUs
//!     bench/       devcomm-bench             twins/   its kernels in Rust and in C++
//!     lib/         GinLoopback's NCCL plugin, and the library of the tests with PyTorch
//!     python/      with `--wheel`, the wheel, unpacked, and its tests, which load kernels/
//! nccl/            lib/libnccl.so.2 (or .xz) and include/nccl.h
//! licences/        the project's, NCCL's, and those of the crates in the programs
//! ```
//!
//! Each program contains the kernels' PTX and cubins; the archive's compression stores them once.
//! Results of slow steps are kept in the target folder, so that packing again takes seconds.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::BufReader;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use cargo_metadata::camino::Utf8PathBuf;
use cargo_metadata::{Message, TargetKind};
use devcomm_cli::setup::{Optional, find_pinned_nccl, setup};
use devcomm_locate::{NCCL_VERSION, NcclTree, NcclVersion};
use libloading::Library;
use xtask::licences::notices;

use crate::project::{EXAMPLES_PACKAGE, Project, cargo, root};
use crate::{cpp, slim, twins, wheel};

const RUN_SH: &str = include_str!("pack_run.sh");
/// The package of the benchmarks.
const BENCH_PACKAGE: &str = "devcomm-bench";
/// The package of GinLoopback's plugin.
const PLUGIN_PACKAGE: &str = "devcomm-rma-loopback";
/// The package whose build script compiles the packed kernels.
const OPS_PACKAGE: &str = "devcomm-ops";
/// A file in every pack. Only a folder with it, or an empty one, is replaced.
const MARKER: &str = ".made-by-cargo-xtask-pack";
const MIB: u64 = 1 << 20;

/// Parses `64M`, `500K`, `2G` or a number of bytes.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let (number, factor) = match text.strip_suffix(['K', 'M', 'G']) {
        Some(number) if text.ends_with('K') => (number, 1 << 10),
        Some(number) if text.ends_with('M') => (number, MIB),
        Some(number) => (number, 1 << 30),
        None => (text, 1),
    };
    let size = number.parse::<u64>().ok().and_then(|number| number.checked_mul(factor));
    size.ok_or_else(|| format!("{text:?} is not a size such as 64M"))
}

/// Makes the folder `out`, default `pack` in the checkout, of at most `limit` bytes. With `slim`,
/// NCCL's library is reduced to that architecture and compressed. `wheel` is packed too.
pub fn pack(limit: u64, slim: Option<u32>, wheel: Option<&Path>, out: Option<&Path>) -> Result<()> {
    let out = match out {
        Some(out) => std::path::absolute(out)?,
        None => root().join("pack"),
    };
    ensure_replaceable(&out)?;
    setup(true, Optional::Ptxas)?;
    let tree = find_pinned_nccl()?;
    let project = Project::open()?;
    let cache = project.target_folder().join("pack");

    let programs = cache.join("programs");
    remove(&programs)?;
    step("programs");
    let kernels = copy_programs(&project, &programs)?;
    step("kernels in Rust and in C++");
    copy_twins(&programs.join("twins"))?;
    copy_cpp(&programs.join("examples"))?;
    if let Some(file) = wheel {
        let python = programs.join("python");
        wheel::unpack(file, &python)?;
        copy_kinds(&root().join("python/tests"), &["py"], &python.join("tests"))?;
        copy_kinds(&kernels, &["ptx", "json", "cubin"], &programs.join("kernels"))?;
    }
    step("archive");
    let archive = archive(&programs)?;
    step("NCCL");
    let library = nccl_library(&tree, slim, &cache)?;

    let crates = cache.join("THIRD_PARTY_CRATES");
    let packed = [EXAMPLES_PACKAGE, BENCH_PACKAGE, PLUGIN_PACKAGE];
    let tested = project.gpu_tests();
    let tested: Vec<&str> = tested.iter().map(|(package, _)| package.as_str()).collect();
    fs::write(&crates, notices(&root().join("Cargo.toml"), &packed, &tested)?)
        .with_context(|| format!("cannot write {}", crates.display()))?;
    let files = contents(&tree, &archive, &library, &crates)?;
    ensure_fits(&files, limit, slim)?;
    write_pack(&files, &out)?;
    let total = files.iter().map(|file| file.size()).sum::<Result<u64>>()?;
    println!("{}: {}; start with ./run.sh list", out.display(), mib(total));
    Ok(())
}

fn step(name: &str) {
    println!("== {name} ==");
}

fn remove(folder: &Path) -> Result<()> {
    match folder.exists() {
        true => fs::remove_dir_all(folder)
            .with_context(|| format!("cannot remove {}", folder.display())),
        false => Ok(()),
    }
}

/// A file of the pack and its source.
struct PackFile {
    from: PathBuf,
    to: PathBuf,
}

impl PackFile {
    fn size(&self) -> Result<u64> {
        let metadata = fs::metadata(&self.from);
        Ok(metadata.with_context(|| format!("cannot read {}", self.from.display()))?.len())
    }
}

/// Returns all files of the pack except run.sh.
fn contents(
    tree: &NcclTree,
    archive: &Path,
    library: &Path,
    crates: &Path,
) -> Result<Vec<PackFile>> {
    let include = tree.include.as_deref().context("the NCCL installation has no headers")?;
    let licence = nccl_licence(tree).with_context(|| {
        format!("no licence of NCCL was found around {}; pack from its wheel", tree.root.display())
    })?;
    let name = library.file_name().unwrap_or_default();
    let mut files = vec![
        (archive.to_owned(), PathBuf::from("programs.tar.xz")),
        (library.to_owned(), Path::new("nccl/lib").join(name)),
        (include.join("nccl.h"), PathBuf::from("nccl/include/nccl.h")),
        (licence, PathBuf::from("licences/NCCL-LICENSE.txt")),
        (crates.to_owned(), PathBuf::from("licences/THIRD_PARTY_CRATES")),
    ];
    let own = ["LICENSE-APACHE", "LICENSE-MIT", "THIRD_PARTY_NOTICES"];
    files.extend(own.map(|name| (root().join(name), Path::new("licences").join(name))));
    Ok(files.into_iter().map(|(from, to)| PackFile { from, to }).collect())
}

/// Checks the size of the pack before writing it.
fn ensure_fits(files: &[PackFile], limit: u64, slim: Option<u32>) -> Result<()> {
    let mut sizes = Vec::new();
    for file in files {
        sizes.push((file.size()?, &file.to));
    }
    sizes.sort_by(|a, b| b.cmp(a));
    let total = sizes.iter().map(|(size, _)| size).sum();
    if total <= limit {
        return Ok(());
    }
    let biggest = sizes.iter().take(3);
    let biggest: String =
        biggest.map(|(size, to)| format!("\n  {:>9}  {}", mib(*size), to.display())).collect();
    let advice = match slim {
        None => "\n`--slim sm_90` reduces NCCL's library to one architecture",
        Some(_) => "",
    };
    bail!(
        "the folder would have {}, the limit is {}; its biggest files:{biggest}{advice}\nWith a \
         larger `--limit`, packing again takes seconds: the results are kept",
        mib(total),
        mib(limit)
    )
}

/// Makes the folder under a temporary name and renames it, so that a failed pack leaves the
/// previous one intact.
fn write_pack(files: &[PackFile], out: &Path) -> Result<()> {
    let parent = out.parent().with_context(|| format!("{} cannot be a pack", out.display()))?;
    fs::create_dir_all(parent).with_context(|| format!("cannot create {}", parent.display()))?;
    let scratch = tempfile::Builder::new()
        .prefix(".devcomm-pack-")
        .tempdir_in(parent)
        .with_context(|| format!("cannot create a folder in {}", parent.display()))?;
    let partial = scratch.path().join("pack");
    for PackFile { from, to } in files {
        let to = partial.join(to);
        fs::create_dir_all(to.parent().unwrap_or(&partial))?;
        fs::copy(from, &to).with_context(|| format!("cannot copy {}", from.display()))?;
    }
    fs::write(partial.join(MARKER), "")?;
    fs::write(partial.join("run.sh"), RUN_SH)?;
    fs::set_permissions(partial.join("run.sh"), fs::Permissions::from_mode(0o755))?;
    remove(out)?;
    fs::rename(&partial, out).with_context(|| format!("cannot create {}", out.display()))
}

/// Refuses to replace a folder that is not a pack.
fn ensure_replaceable(out: &Path) -> Result<()> {
    let replaceable = !out.exists()
        || out.join(MARKER).is_file()
        || fs::read_dir(out).is_ok_and(|mut entries| entries.next().is_none());
    ensure!(
        replaceable,
        "{} exists and is not a pack (it has no {MARKER}); remove it or choose another --out",
        out.display()
    );
    Ok(())
}

/// Builds the examples, benchmarks and GPU tests, and copies them. Returns the folder of their
/// kernels.
fn copy_programs(project: &Project, to: &Path) -> Result<PathBuf> {
    let mut made = BuildOutputs::default();
    let packages = ["--package", EXAMPLES_PACKAGE, "--package", BENCH_PACKAGE, "--bins"];
    build(project, "build", &packages, to, &mut made)?;
    let tests = project.gpu_tests();
    let selected: Vec<&str> = tests
        .iter()
        .flat_map(|(package, names)| {
            let names = names.iter().flat_map(|name| ["--test", name.as_str()]);
            ["--package", package.as_str()].into_iter().chain(names)
        })
        .collect();
    build(project, "test", &[&["--no-run"], &selected[..]].concat(), to, &mut made)?;

    for name in ["libdevcomm_rma_loopback.so", "libdevcomm_torch_tests.so"] {
        let library = made.libraries.get(name).with_context(|| format!("the build made no {name}"));
        copy_into(library?, &to.join("lib").join(name))?;
    }
    fs::write(to.join("lib/network.sh"), network_sh())?;
    made.kernels.context("the build script of devcomm-ops made no kernels")
}

/// Returns run.sh's environment for GIN without an RDMA card. run.sh sets `$programs` to the
/// unpacked folder.
fn network_sh() -> String {
    let plugin = Path::new("$programs/lib/libdevcomm_rma_loopback.so");
    let variables = devcomm_locate::gin_loopback_environment(plugin);
    variables.map(|(name, value)| format!("export {name}=\"{value}\"\n")).concat()
}

/// Outputs of builds other than programs.
#[derive(Default)]
struct BuildOutputs {
    /// The folder of the kernels.
    kernels: Option<PathBuf>,
    /// Shared libraries, by file name.
    libraries: BTreeMap<String, PathBuf>,
}

/// Runs cargo, copies the programs that it reports, and records its other outputs.
fn build(
    project: &Project,
    task: &str,
    select: &[&str],
    to: &Path,
    made: &mut BuildOutputs,
) -> Result<()> {
    let mut child = cargo()
        .arg(task)
        .args(["--release", "--features", "ptx", "--message-format=json-render-diagnostics"])
        .args(select)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .context("cargo does not start")?;
    let stdout = child.stdout.take().context("cargo's output was not piped")?;
    for message in Message::parse_stream(BufReader::new(stdout)) {
        match message? {
            Message::CompilerArtifact(artifact) => {
                let package = project.package(&artifact.package_id);
                let folder = match package.map(|package| package.name.as_str()) {
                    _ if artifact.profile.test => "tests",
                    Some(BENCH_PACKAGE) => "bench",
                    Some(EXAMPLES_PACKAGE) => "examples",
                    _ => "",
                };
                let kinds = &artifact.target.kind;
                if let (Some(program), false) = (&artifact.executable, folder.is_empty()) {
                    copy_into(program.as_std_path(), &to.join(folder).join(&artifact.target.name))?;
                } else if kinds.contains(&TargetKind::CDyLib) {
                    let shared = |path: &&Utf8PathBuf| path.extension() == Some("so");
                    if let Some(path) = artifact.filenames.iter().find(shared) {
                        let name = format!("lib{}.so", artifact.target.name);
                        made.libraries.insert(name, path.into());
                    }
                }
            }
            Message::BuildScriptExecuted(script) => {
                let package = project.package(&script.package_id);
                if package.is_some_and(|package| package.name == OPS_PACKAGE) {
                    made.kernels = Some(script.out_dir.join("kernels").into());
                }
            }
            _ => {}
        }
    }
    ensure!(child.wait()?.success(), "cargo {task} {} failed, see above", select.join(" "));
    Ok(())
}

fn copy_into(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to.parent().unwrap_or(to))?;
    fs::copy(from, to).with_context(|| format!("cannot copy {}", from.display()))?;
    Ok(())
}

/// Copies the files with these extensions.
fn copy_kinds(from: &Path, kinds: &[&str], to: &Path) -> Result<()> {
    let entries = fs::read_dir(from).with_context(|| format!("cannot read {}", from.display()))?;
    for entry in entries {
        let path = entry?.path();
        let kind = path.extension().unwrap_or_default();
        if kinds.iter().any(|wanted| kind == *wanted) {
            copy_into(&path, &to.join(path.file_name().unwrap_or_default()))?;
        }
    }
    Ok(())
}

/// Compiles and copies the C++ twins and their Rust kernels. A failure is only a warning.
fn copy_twins(target: &Path) -> Result<()> {
    let folder = match twins::build() {
        Ok(twins) => twins.folder,
        Err(error) => {
            eprintln!("warning: packing without the C++ twins: {error:#}");
            return Ok(());
        }
    };
    for language in ["rust", "cpp"] {
        copy_kinds(&folder.join(language), &["cubin", "json"], &target.join(language))?;
    }
    Ok(())
}

/// Compiles the C++ programs and copies them as `cpp_NAME`. A failure is only a warning.
fn copy_cpp(target: &Path) -> Result<()> {
    let programs = match cpp::build() {
        Ok(programs) => programs,
        Err(error) => {
            eprintln!("warning: packing without the C++ programs: {error:#}");
            return Ok(());
        }
    };
    for program in programs {
        let name = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
        copy_into(&program, &target.join(format!("cpp_{name}")))?;
    }
    Ok(())
}

/// Returns NCCL's licence: next to the package in a wheel, in `*.dist-info`; inside other trees.
fn nccl_licence(tree: &NcclTree) -> Option<PathBuf> {
    let siblings =
        tree.root.parent().and_then(Path::parent).and_then(|site| fs::read_dir(site).ok());
    let infos = siblings.into_iter().flatten().flatten().map(|entry| entry.path()).filter(|path| {
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

/// Writes the archive of a folder next to it; an archive of unchanged files is reused.
fn archive(folder: &Path) -> Result<PathBuf> {
    let (tar, new) = (folder.with_extension("tar"), folder.with_extension("tar.new"));
    let archive = folder.with_extension("tar.xz");
    let mut command = Command::new("tar");
    // With these flags equal files give an equal archive.
    command.args(["--sort=name", "--mtime=@0", "--owner=0", "--group=0", "--numeric-owner"]);
    let status = command.arg("-C").arg(folder).arg("-cf").arg(&new).arg(".").status();
    let status = status.context("tar does not start")?;
    ensure!(status.success(), "tar ended with {status} on {}", folder.display());
    if archive.is_file()
        && fs::read(&tar).is_ok_and(|old| fs::read(&new).is_ok_and(|new| new == old))
    {
        fs::remove_file(new)?;
    } else {
        compress(&new, &archive)?;
        fs::rename(new, tar)?;
    }
    Ok(archive)
}

/// Returns NCCL's library: unchanged, or reduced and compressed in the folder `cache`.
fn nccl_library(tree: &NcclTree, slim: Option<u32>, cache: &Path) -> Result<PathBuf> {
    let library = tree.library.as_deref().context("the NCCL installation has no library")?;
    let Some(arch) = slim else { return Ok(library.to_owned()) };
    let folder = cache.join(format!("nccl-{NCCL_VERSION}-sm_{arch}"));
    let (reduced, packed) = (folder.join("libnccl.so.2"), folder.join("libnccl.so.2.xz"));
    if packed.is_file() {
        return Ok(packed);
    }
    fs::create_dir_all(&folder)?;
    println!("reducing the library to sm_{arch} and compressing it ...");
    let mut image = fs::read(library)?;
    slim::slim(&mut image, arch).with_context(|| format!("cannot reduce {}", library.display()))?;
    fs::write(&reduced, &image)?;
    let version = version_of_library(&reduced).context("the reduced library does not work")?;
    ensure!(version == NCCL_VERSION, "the reduced library reports NCCL {version}");
    compress(&reduced, &packed)?;
    fs::remove_file(reduced)?;
    Ok(packed)
}

/// Loads NCCL's library and queries its version.
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

/// Compresses a file to `target` atomically, with `xz` or else Python's lzma.
fn compress(file: &Path, target: &Path) -> Result<()> {
    // The dictionary of 64 MiB spans several programs, which contain the same kernels. With more
    // than one thread `xz` makes independent blocks, and each would have the kernels again. Preset
    // 6 takes three times as long, for an archive that is a tenth smaller.
    let lzma = "import lzma, shutil, sys; filters = [{'id': lzma.FILTER_LZMA2, 'preset': 3, \
                'dict_size': 1 << 26}]; packed = lzma.open(sys.stdout.buffer, 'wb', \
                filters=filters); shutil.copyfileobj(sys.stdin.buffer, packed, 1 << 20); \
                packed.close()";
    let unfinished = target.with_extension("unfinished");
    for (program, args) in
        [("xz", ["--lzma2=preset=3,dict=64MiB", "-cT1"]), ("python3", ["-c", lzma])]
    {
        let status = Command::new(program)
            .args(args)
            .stdin(File::open(file)?)
            .stdout(File::create(&unfinished)?)
            .status();
        match status {
            Ok(status) if status.success() => return Ok(fs::rename(unfinished, target)?),
            Ok(status) => bail!("{program} ended with {status} on {}", file.display()),
            // It is not installed: the next one is tried.
            Err(_) => {}
        }
    }
    bail!("compression needs xz or python3, and neither starts")
}

fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / MIB as f64)
}

#[cfg(test)]
mod tests;
