//! `devcomm doctor`: reports every component with its version and path, or the command that
//! installs it.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Result;
use comfy_table::{Table, presets};
use devcomm_locate::{
    FoundBy, GinGpus, GinRoute, NCCL_VERSION, NcclPart, NcclTree, PipNccl, cache_dir_if_safe,
    find_nccl, find_ptxas, gin_support, quoted,
};
use serde::Serialize;

use crate::cuda;
use crate::wheels::{damage, python_with_pip};

/// Show every component with its version, its path and the command that fixes what is missing
#[derive(Debug, clap::Args)]
pub struct Doctor {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Why a component is needed.
#[derive(Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum NeededFor {
    /// The build needs it.
    Build,
    /// A component for setup, reports or running; the build does not need it.
    Extra,
}

/// One row of the report.
#[derive(Serialize)]
struct Component {
    name: &'static str,
    need: NeededFor,
    found: bool,
    version: Option<String>,
    path: Option<PathBuf>,
    /// A remark, or why the component counts as missing.
    note: Option<String>,
    /// The command or step that installs it.
    fix: Option<String>,
}

impl Component {
    fn new(name: &'static str, need: NeededFor) -> Self {
        Self { name, need, found: true, version: None, path: None, note: None, fix: None }
    }

    fn missing(name: &'static str, need: NeededFor, note: impl ToString, fix: &str) -> Self {
        Self {
            found: false,
            note: Some(note.to_string()),
            fix: Some(fix.to_owned()),
            ..Self::new(name, need)
        }
    }

    fn state(&self) -> &'static str {
        match (self.found, self.need) {
            (true, _) => "ok",
            (false, NeededFor::Build) => "MISSING",
            (false, NeededFor::Extra) => "none",
        }
    }
}

impl Doctor {
    /// Prints the report; the exit code is 0 if kernel builds have everything they need. `setup` is
    /// the command that installs most components.
    ///
    /// # Errors
    ///
    /// If `DEVCOMM_CACHE` is a relative path. What is missing is part of the report.
    pub fn run(&self, setup: &str) -> Result<u8> {
        cache_dir_if_safe()?;
        let machine = cuda::driver_info();
        let components = examine(&machine, setup);
        let networks = networks(machine.as_ref().ok().and_then(|machine| machine.gin));
        let ready = components
            .iter()
            .all(|component| component.found || component.need != NeededFor::Build);
        if self.json {
            let report =
                serde_json::json!({ "ready": ready, "components": components, "gin": networks });
            println!("{report:#}");
        } else {
            print_components(&components);
            print_networks(&networks);
            println!("\n{}", if ready { "ready to build" } else { "not ready to build" });
        }
        Ok(u8::from(!ready))
    }
}

fn print_components(components: &[Component]) {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(["component", "state", "version", "where"]);
    for component in components {
        let path = component.path.as_deref().map(|path| path.display().to_string());
        table.add_row([
            component.name,
            component.state(),
            component.version.as_deref().unwrap_or("-"),
            path.as_deref().unwrap_or("-"),
        ]);
    }
    println!("{table}");
    for component in components {
        if let Some(note) = &component.note {
            println!("\n{}: {note}", component.name);
        }
        if let Some(fix) = &component.fix {
            println!("  fix: {fix}");
        }
    }
}

/// A GIN route (back end and transport) and whether it can work here, from [`gin_support`].
#[derive(Serialize)]
struct Network {
    route: String,
    possible: bool,
    needs: &'static str,
    /// The hardware or software that was found for it, or what is missing.
    here: String,
    /// The environment variables to set.
    environment: Vec<(&'static str, String)>,
}

/// Returns the support of each GIN route, as far as one host shows it without NCCL.
fn networks(gpus: Option<GinGpus>) -> Vec<Network> {
    let support = gin_support(gpus);
    let network = |route: GinRoute| {
        let verdict = support.verdict(route);
        let environment = match (route, &support.loopback) {
            (GinRoute::ProxyLoopback, Ok(plugin)) => {
                devcomm_locate::gin_loopback_environment(plugin).to_vec()
            }
            _ => Vec::new(),
        };
        Network {
            route: route.to_string(),
            possible: verdict.is_ok(),
            needs: route.needs(),
            here: verdict.unwrap_or_else(|why| why),
            environment,
        }
    };
    GinRoute::ALL.into_iter().map(network).collect()
}

fn print_networks(networks: &[Network]) {
    println!("\nGIN (network communication from kernels) on this machine:");
    for Network { route, possible, needs, here, environment } in networks {
        println!("  {route:<18} {}", if *possible { "possible" } else { "no" });
        println!("    needs: {needs}\n    here: {here}");
        if *possible && !environment.is_empty() {
            let pairs = environment.iter().map(|(name, value)| format!("{name}={}", quoted(value)));
            println!("    use: GinLoopback, or {}", pairs.collect::<Vec<_>>().join(" "));
        }
    }
}

fn examine(machine: &Result<cuda::DriverInfo, String>, setup: &str) -> Vec<Component> {
    let mut all = vec![rust_tool("rustc", "RUSTC"), rust_tool("cargo", "CARGO")];
    all.push(kernel_compiler(setup));
    all.push(nccl("NCCL library", NcclPart::Library, NeededFor::Extra, setup, |tree| {
        tree.library.clone()
    }));
    all.push(nccl("NCCL bitcode", NcclPart::Bitcode, NeededFor::Build, setup, |tree| {
        tree.bitcode.clone()
    }));
    all.push(ptxas(setup));
    all.push(python());
    all.extend(gpus(machine));
    all
}

/// Returns rustc or cargo, as a build uses it.
fn rust_tool(name: &'static str, variable: &str) -> Component {
    const INSTALL: &str = "install Rust through https://rustup.rs";
    let program = std::env::var_os(variable).map_or_else(|| PathBuf::from(name), PathBuf::from);
    let Some(version) = first_line(Command::new(&program).arg("--version")) else {
        return Component::missing(name, NeededFor::Build, "it does not run", INSTALL);
    };
    // "rustc 1.95.0 (59807616e 2026-04-14)"
    let number = version.split_whitespace().nth(1).unwrap_or(&version).to_owned();
    let minimum = env!("CARGO_PKG_RUST_VERSION");
    if parts(&number) < parts(minimum) {
        let note = format!("it is {number}; {minimum} or newer is required");
        return Component::missing(name, NeededFor::Build, note, "rustup update");
    }
    Component {
        version: Some(number),
        path: on_path(&program),
        ..Component::new(name, NeededFor::Build)
    }
}

fn parts(version: &str) -> Vec<u32> {
    version.split(['.', '-']).map_while(|part| part.parse().ok()).collect()
}

/// Returns the compiler of kernels, which need not be the one of the host's code.
fn kernel_compiler(setup: &str) -> Component {
    const NAME: &str = "kernel rustc";
    match cuda_builder::kernel_compiler() {
        Ok(compiler) => Component {
            // "rustc 1.95.0 (59807616e 2026-04-14)"
            version: compiler.version.split_whitespace().nth(1).map(str::to_owned),
            path: on_path(&compiler.rustc),
            note: Some(format!(
                "{} is its LLVM {}",
                compiler.libllvm.display(),
                compiler.llvm_version
            )),
            ..Component::new(NAME, NeededFor::Build)
        },
        Err(error) => Component::missing(NAME, NeededFor::Build, error, setup),
    }
}

fn nccl(
    name: &'static str,
    part: NcclPart,
    need: NeededFor,
    setup: &str,
    path: impl Fn(&NcclTree) -> Option<PathBuf>,
) -> Component {
    // The builder links the bitcode of one version; the library may be of another.
    let accept = |tree: &NcclTree| match part {
        NcclPart::Bitcode => tree.has_version(NCCL_VERSION),
        _ => Ok(()),
    };
    match find_nccl(None, part, accept) {
        Ok(tree) => {
            let path = path(&tree);
            if let Some(damage) = path.as_deref().and_then(damage) {
                return Component::missing(name, need, damage, setup);
            }
            let other = tree.version.is_some_and(|version| version != NCCL_VERSION);
            Component {
                version: tree.version.map(|version| version.to_string()),
                path,
                note: other.then(|| {
                    format!(
                        "found by {}; devcomm is built and tested with NCCL {NCCL_VERSION}, and \
                         another version may be refused",
                        tree.found_by
                    )
                }),
                fix: other.then(|| replacement(&tree, setup)),
                ..Component::new(name, need)
            }
        }
        Err(not_found) => Component::missing(name, need, not_found, setup),
    }
}

/// Returns how the search finds [`NCCL_VERSION`] instead of this tree.
fn replacement(tree: &NcclTree, setup: &str) -> String {
    match tree.found_by {
        FoundBy::DevcommNcclHome | FoundBy::NcclHome => {
            let variable = tree.found_by;
            format!(
                "set {variable} to a folder of NCCL {NCCL_VERSION}, or unset it and run {setup}"
            )
        }
        FoundBy::SitePackages => match tree.library.as_deref().and_then(PipNccl::of_library) {
            Some(nccl) => nccl.install(NCCL_VERSION).to_string(),
            None => format!("install NCCL {NCCL_VERSION} in {}", tree.root.display()),
        },
        // The newest wheel of the cache is found first.
        FoundBy::Cache if tree.version > Some(NCCL_VERSION) => {
            format!("remove {} and run {setup}", tree.root.display())
        }
        FoundBy::Explicit | FoundBy::Cache | FoundBy::System => setup.to_owned(),
    }
}

fn ptxas(setup: &str) -> Component {
    match find_ptxas() {
        Ok(path) if let Some(damage) = damage(&path) => {
            Component::missing("ptxas", NeededFor::Extra, damage, setup)
        }
        Ok(path) => Component {
            version: first_of(Command::new(&path).arg("--version"), |line| {
                line.split_once("release ")?.1.split(',').next()
            }),
            path: Some(path),
            ..Component::new("ptxas", NeededFor::Extra)
        },
        Err(not_found) => Component::missing("ptxas", NeededFor::Extra, not_found, setup),
    }
}

fn python() -> Component {
    match python_with_pip() {
        Ok(python) => Component {
            version: first_of(Command::new(python).arg("--version"), |line| {
                line.strip_prefix("Python ")
            }),
            path: on_path(Path::new(python)),
            ..Component::new("Python, pip", NeededFor::Extra)
        },
        Err(error) => {
            let fix = "install Python 3 with pip (only setup needs it)";
            Component::missing("Python, pip", NeededFor::Extra, error, fix)
        }
    }
}

fn gpus(machine: &Result<cuda::DriverInfo, String>) -> [Component; 3] {
    let machine = match machine {
        Ok(machine) => machine,
        Err(reason) => {
            let fix = "install NVIDIA's driver; without it kernels run in the simulator";
            let driver = Component::missing("CUDA driver", NeededFor::Extra, reason, fix);
            let absent =
                |name| Component { found: false, ..Component::new(name, NeededFor::Extra) };
            return [driver, absent("GPUs"), absent("peer access")];
        }
    };
    let count = machine.gpus.len();
    let pairs = count * count.saturating_sub(1);
    [
        Component {
            version: Some(machine.driver.clone()),
            path: Some("libcuda.so.1".into()),
            ..Component::new("CUDA driver", NeededFor::Extra)
        },
        Component {
            found: count > 0,
            version: Some(count.to_string()),
            note: (count > 0).then(|| machine.gpus.join(", ")),
            ..Component::new("GPUs", NeededFor::Extra)
        },
        Component {
            found: machine.peer_pairs > 0,
            note: (pairs > 0).then(|| {
                format!(
                    "of {pairs} ordered pairs of GPUs, {} have peer access, {} with native \
                     atomics (NVLink)",
                    machine.peer_pairs, machine.atomic_pairs
                )
            }),
            ..Component::new("peer access", NeededFor::Extra)
        },
    ]
}

/// Returns the program's path in `PATH`.
fn on_path(program: &Path) -> Option<PathBuf> {
    if program.components().count() > 1 {
        return Some(program.to_owned());
    }
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(program)).find(|path| path.is_file())
}

fn first_line(command: &mut Command) -> Option<String> {
    first_of(command, |line| Some(line))
}

/// Returns the first result of `pick` over the lines of a program's output.
fn first_of(command: &mut Command, pick: impl Fn(&str) -> Option<&str>) -> Option<String> {
    let output = command.output().ok().filter(|output| output.status.success())?;
    let text = String::from_utf8(output.stdout).ok()?;
    text.lines().find_map(pick).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use devcomm_locate::NcclVersion;

    use super::*;

    #[test]
    fn rust_versions_compare_as_numbers() {
        assert!(parts("1.97.0-nightly") > parts("1.95"));
        assert!(parts("1.95.0") >= parts("1.95"));
        assert!(parts("1.100.0") > parts("1.95"));
    }

    #[test]
    fn the_fix_for_another_version_of_nccl_is_for_the_place_that_the_search_prefers() {
        let fix = |root: &str, found_by, minor| {
            let tree = NcclTree {
                root: root.into(),
                found_by,
                library: Some(Path::new(root).join("lib/libnccl.so.2")),
                bitcode: None,
                include: None,
                version: Some(NcclVersion { major: 2, minor, patch: 0 }),
            };
            replacement(&tree, "devcomm setup")
        };
        let wheel = fix("/env/lib/python3.12/site-packages/nvidia/nccl", FoundBy::SitePackages, 28);
        assert!(
            wheel.contains(&format!("pip install nvidia-nccl-cu13=={NCCL_VERSION}")),
            "{wheel}"
        );
        let variable = fix("/nccl", FoundBy::NcclHome, 28);
        assert!(variable.starts_with("set NCCL_HOME to a folder of NCCL"), "{variable}");
        let newer = fix("/cache/wheels/nvidia-nccl-cu13-2.99.0/nvidia/nccl", FoundBy::Cache, 99);
        assert!(newer.starts_with("remove /cache/wheels/"), "{newer}");
        for (place, minor) in [(FoundBy::Cache, 28), (FoundBy::System, 28), (FoundBy::System, 99)] {
            assert_eq!(fix("/nccl", place, minor), "devcomm setup");
        }
    }
}
