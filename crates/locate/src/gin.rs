//! Detects which back ends of NCCL's GIN the system supports, as far as possible without NCCL.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use crate::env::Env;
use crate::error::NotFound;
use crate::loopback::find_gin_loopback_in;

/// A route of a kernel's puts: a GIN back end and the transport that it uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GinRoute {
    /// PROXY: a host thread posts the kernel's operations to an RDMA network card.
    ProxyRdma,
    /// PROXY over TCP: NCCL's own RMA plugin over sockets, since 2.32.3. NCCL takes it where no
    /// other plugin and no RDMA card serves PROXY.
    ProxyTcp,
    /// PROXY by CUDA copies between the GPUs of one host: devcomm's plugin.
    ProxyLoopback,
    /// The kernel rings the doorbells of an mlx5 card itself.
    Gdaki,
    /// The GPU-Push Interface of Spectrum-X.
    Gpi,
    /// GPUDirect Async of Amazon's EFA.
    EfaGda,
}

impl GinRoute {
    /// All routes.
    pub const ALL: [Self; 6] = [
        Self::ProxyRdma,
        Self::ProxyTcp,
        Self::ProxyLoopback,
        Self::Gdaki,
        Self::Gpi,
        Self::EfaGda,
    ];

    /// Returns NCCL's number of the back end, `ncclGinType_t`.
    #[must_use]
    pub const fn gin_type(self) -> i32 {
        match self {
            Self::ProxyRdma | Self::ProxyTcp | Self::ProxyLoopback => 2,
            Self::Gdaki => 3,
            Self::Gpi => 4,
            Self::EfaGda => 5,
        }
    }

    /// Returns what the route requires in addition to GPUs, as text.
    #[must_use]
    pub const fn needs(self) -> &'static str {
        match self {
            Self::ProxyRdma => {
                "an InfiniBand or RoCE card that reaches GPU memory (DMA-BUF, or the module \
                nvidia_peermem)"
            }
            Self::ProxyTcp => {
                "NCCL_GDRCOPY_ENABLE=1, and GDRCopy (/dev/gdrdrv) or a driver for CUDA 13.3"
            }
            Self::ProxyLoopback => {
                "all ranks on one host, and devcomm's plugin (GinLoopback, or NCCL_RMA_PLUGIN)"
            }
            Self::Gdaki => "an mlx5 card that reaches GPU memory (DMA-BUF, or nvidia_peermem)",
            Self::Gpi => "the Spectrum-X plugin, named by NCCL_GIN_PLUGIN",
            Self::EfaGda => "an EFA device, and the AWS OFI plugin",
        }
    }
}

impl fmt::Display for GinRoute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::ProxyRdma => "PROXY over RDMA",
            Self::ProxyTcp => "PROXY over TCP",
            Self::ProxyLoopback => "PROXY by loopback",
            Self::Gdaki => "GDAKI",
            Self::Gpi => "GPI",
            Self::EfaGda => "EFA_GDA",
        })
    }
}

/// The CUDA driver's properties that GIN depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GinGpus {
    /// The CUDA version that the driver supports, 13000 for 13.0.
    pub driver: i32,
    /// Whether all GPUs have `GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED`, without which NCCL offers
    /// no GIN at all.
    pub rdma_with_vmm: bool,
}

/// A device in `/sys/class/infiniband`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RdmaDevice {
    /// The name, e.g. `mlx5_0`, or `rocep1s0f0` where the system names devices by PCI location.
    pub name: String,
    /// The Linux driver, which identifies its kind: `mlx5_core`, `efa`; empty if unreadable.
    pub driver: String,
}

impl fmt::Display for RdmaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.driver.as_str() {
            "" => f.write_str(&self.name),
            driver => write!(f, "{} ({driver})", self.name),
        }
    }
}

/// A system's support for GIN.
#[derive(Clone, Debug)]
pub struct GinSupport {
    /// The RDMA devices that Linux lists.
    pub rdma_devices: Vec<RdmaDevice>,
    /// The loaded Linux module through which network cards access GPU memory without DMA-BUF.
    pub peer_memory: Option<&'static str>,
    /// Whether GDRCopy's driver is loaded.
    pub gdrdrv: bool,
    /// devcomm's RMA plugin, for [`GinRoute::ProxyLoopback`].
    pub loopback: Result<PathBuf, NotFound>,
    /// The GPUs' properties; `None` without GPUs, or if not queried.
    pub gpus: Option<GinGpus>,
    /// NCCL settings that disable GIN as a whole, such as `NCCL_GIN_ENABLE=0`.
    pub hindered_by: Vec<String>,
    /// `NCCL_GIN_TYPE`, if set.
    gin_type: Option<String>,
    /// `NCCL_GIN_PLUGIN`, if set.
    gin_plugin: Option<String>,
    /// `NCCL_GDRCOPY_ENABLE`, if set.
    gdrcopy: Option<String>,
    /// `NCCL_RMA_PLUGIN`, if set.
    rma_plugin: Option<String>,
    /// Whether `NCCL_IB_DISABLE` keeps NCCL from RDMA cards.
    ib_disabled: bool,
}

/// Detects this system's support. `gpus` has the properties that the caller has queried.
#[must_use]
pub fn gin_support(gpus: Option<GinGpus>) -> GinSupport {
    gin_support_in(&Env::real(), Path::new("/"), gpus)
}

fn gin_support_in(env: &Env, root: &Path, gpus: Option<GinGpus>) -> GinSupport {
    let text = |name: &str| {
        (env.var)(name)
            .map(|value| value.to_string_lossy().trim().to_owned())
            .filter(|v| !v.is_empty())
    };
    let zero = |name: &str| text(name).filter(|v| v == "0").map(|_| format!("{name}=0"));
    let disabling = ["NCCL_GIN_ENABLE", "NCCL_CUMEM_ENABLE", "NCCL_WIN_ENABLE"];
    let module = |name: &&str| root.join("sys/module").join(name).is_dir();
    GinSupport {
        rdma_devices: rdma_devices(&root.join("sys/class/infiniband")),
        peer_memory: ["nvidia_peermem", "nv_peer_mem"].into_iter().find(module),
        gdrdrv: root.join("dev/gdrdrv").exists(),
        loopback: find_gin_loopback_in(env, None),
        gpus,
        hindered_by: disabling.into_iter().filter_map(zero).collect(),
        gin_type: text("NCCL_GIN_TYPE"),
        gin_plugin: text("NCCL_GIN_PLUGIN"),
        gdrcopy: text("NCCL_GDRCOPY_ENABLE"),
        rma_plugin: text("NCCL_RMA_PLUGIN"),
        ib_disabled: text("NCCL_IB_DISABLE").is_some_and(|value| value != "0"),
    }
}

fn rdma_devices(folder: &Path) -> Vec<RdmaDevice> {
    let name_of = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
    let device = |entry: fs::DirEntry| {
        let driver = fs::canonicalize(entry.path().join("device/driver")).ok();
        let driver = driver.and_then(|path| name_of(&path)).unwrap_or_default();
        RdmaDevice { name: entry.file_name().to_string_lossy().into_owned(), driver }
    };
    let mut devices: Vec<_> =
        fs::read_dir(folder).into_iter().flatten().flatten().map(device).collect();
    devices.sort_by(|a, b| a.name.cmp(&b.name));
    devices
}

impl GinSupport {
    /// Returns whether there is any RDMA device, which NCCL would use by default.
    #[must_use]
    pub fn has_rdma(&self) -> bool {
        !self.rdma_devices.is_empty()
    }

    /// Returns whether a route looks possible; if so, what suggests that. NCCL itself decides, from
    /// the support on all ranks.
    ///
    /// # Errors
    ///
    /// What is missing, as text.
    pub fn verdict(&self, route: GinRoute) -> Result<String, String> {
        if let Some(first) = self.hindered_by.first() {
            return Err(format!("{first} disables GIN in NCCL"));
        }
        // A negative number, NCCL's default, leaves the choice to NCCL.
        if let Some(value) = &self.gin_type
            && value.parse().is_ok_and(|number: i32| number >= 0 && number != route.gin_type())
        {
            return Err(format!("NCCL_GIN_TYPE={value} selects another back end"));
        }
        match self.gpus {
            None => return Err("no GPU was found".to_owned()),
            Some(GinGpus { rdma_with_vmm: false, .. }) => {
                return Err(
                    "not every GPU has GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, which NCCL \
                    requires for every GIN back end"
                        .to_owned(),
                );
            }
            Some(_) => {}
        }
        match route {
            GinRoute::ProxyRdma => self.ib_verdict(|kind| kind != "efa"),
            GinRoute::Gdaki => self.ib_verdict(|kind| kind == "mlx5"),
            GinRoute::EfaGda => self.rdma_verdict(|kind| kind == "efa"),
            GinRoute::ProxyTcp => self.tcp_verdict(),
            GinRoute::ProxyLoopback => match &self.loopback {
                Ok(path) => Ok(path.display().to_string()),
                Err(error) => Err(format!("{}: {}", error.what(), error.advice())),
            },
            GinRoute::Gpi => match &self.gin_plugin {
                Some(name) => Ok(format!("NCCL_GIN_PLUGIN={name}, if that is Spectrum-X's")),
                None => Err("NCCL_GIN_PLUGIN is not set".to_owned()),
            },
        }
    }

    /// Returns the verdict on NCCL's sockets, the last of the plugins that NCCL tries for PROXY.
    fn tcp_verdict(&self) -> Result<String, String> {
        let newer = self.gpus.is_some_and(|gpus| gpus.driver >= 13_030);
        if !(self.gdrdrv || newer) {
            return Err("neither /dev/gdrdrv nor a driver for CUDA 13.3 is present".to_owned());
        }
        match self.gdrcopy.as_deref() {
            Some("1") => {}
            Some(other) => return Err(format!("NCCL_GDRCOPY_ENABLE is {other}")),
            None => return Err("NCCL_GDRCOPY_ENABLE is not set".to_owned()),
        }
        if let Some(name) = &self.rma_plugin
            && !name.eq_ignore_ascii_case("none")
        {
            return Err(format!("NCCL takes NCCL_RMA_PLUGIN={name} before it"));
        }
        if let Ok(card) = self.verdict(GinRoute::ProxyRdma) {
            return Err(format!("NCCL takes {card} before it, unless NCCL_IB_DISABLE=1"));
        }
        Ok("NCCL_GDRCOPY_ENABLE=1".to_owned())
    }

    /// Returns the verdict on a route of NCCL's own code for RDMA cards, which `NCCL_IB_DISABLE`
    /// disables.
    fn ib_verdict(&self, accepts: impl Fn(&str) -> bool) -> Result<String, String> {
        let verdict = self.rdma_verdict(accepts)?;
        if self.ib_disabled {
            return Err("NCCL_IB_DISABLE disables RDMA cards in NCCL".to_owned());
        }
        Ok(verdict)
    }

    /// Returns the verdict on a route that needs an RDMA device of an accepted kind. The kind is
    /// the first part of the driver's name, else of the device's name: `mlx5` of `mlx5_core`.
    fn rdma_verdict(&self, accepts: impl Fn(&str) -> bool) -> Result<String, String> {
        let is_accepted = |device: &&RdmaDevice| {
            let name = if device.driver.is_empty() { &device.name } else { &device.driver };
            accepts(name.split('_').next().unwrap_or_default())
        };
        let list = |devices: Vec<&RdmaDevice>| {
            devices.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
        };
        let accepted: Vec<_> = self.rdma_devices.iter().filter(is_accepted).collect();
        if accepted.is_empty() {
            return Err(if self.rdma_devices.is_empty() {
                "there is no RDMA device".to_owned()
            } else {
                format!("the RDMA devices are {}", list(self.rdma_devices.iter().collect()))
            });
        }
        let by = self.peer_memory.unwrap_or("DMA-BUF, if Linux and the card support it");
        Ok(format!("{} through {by}", list(accepted)))
    }

    /// Returns why this process does not use a route that looks possible; `None` if it may. Only
    /// devcomm's plugin, which NCCL does not find by itself, must be enabled.
    fn why_disabled(&self, route: GinRoute) -> Option<String> {
        let plugin = self.loopback.as_ref().ok().filter(|_| route == GinRoute::ProxyLoopback)?;
        let Some(named) = &self.rma_plugin else {
            return Some("it is not enabled: NCCL_RMA_PLUGIN is not set".to_owned());
        };
        // NCCL reads a list, and either path may be a link to the file.
        let is_plugin = |path: &str| fs::canonicalize(path).ok() == fs::canonicalize(plugin).ok();
        (!named.split(',').any(is_plugin)).then(|| format!("NCCL_RMA_PLUGIN is {named}"))
    }

    /// Returns text for an error message: why each route of a back end is unavailable. `None`
    /// stands for all back ends.
    #[must_use]
    pub fn why_not(&self, gin_type: Option<i32>) -> String {
        let routes = GinRoute::ALL.into_iter();
        let of_type =
            routes.filter(|route| gin_type.is_none_or(|number| route.gin_type() == number));
        let lines = of_type.map(|route| match (self.verdict(route), self.why_disabled(route)) {
            (Err(why), _) | (Ok(_), Some(why)) => {
                format!("{route} needs {}; here {why}", route.needs())
            }
            (Ok(how), None) => {
                format!("{route} looks possible on this rank ({how}); NCCL needs it on all")
            }
        });
        lines.collect::<Vec<_>>().join(". ")
    }
}

#[cfg(test)]
#[path = "gin_tests.rs"]
mod tests;
