//! The shape of a launch.

use core::fmt;

/// Three extents. A number is the first of them, the others being 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "CUDA's names")]
pub struct Dim3 {
    pub x: u32,
    pub y: u32,
    pub z: u32,
}

impl Dim3 {
    /// The product of the extents.
    #[must_use]
    pub const fn count(self) -> u64 {
        // The driver's limits keep this far from overflow; a wild value must not wrap to a small
        // one.
        (self.x as u64).saturating_mul(self.y as u64).saturating_mul(self.z as u64)
    }

    /// x, y, z.
    #[must_use]
    pub const fn to_array(self) -> [u32; 3] {
        [self.x, self.y, self.z]
    }
}

impl From<u32> for Dim3 {
    fn from(x: u32) -> Self {
        Self { x, y: 1, z: 1 }
    }
}

impl From<(u32, u32)> for Dim3 {
    fn from((x, y): (u32, u32)) -> Self {
        Self { x, y, z: 1 }
    }
}

impl From<(u32, u32, u32)> for Dim3 {
    fn from((x, y, z): (u32, u32, u32)) -> Self {
        Self { x, y, z }
    }
}

impl fmt::Display for Dim3 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.y, self.z) {
            (1, 1) => write!(f, "{}", self.x),
            _ => write!(f, "{}x{}x{}", self.x, self.y, self.z),
        }
    }
}

/// How many blocks of how many threads, and how much dynamic shared memory a block.
///
/// ```
/// use devcomm_types::LaunchConfig;
/// let config = LaunchConfig::new(64, 512).with_dynamic_shared(16 << 10);
/// assert_eq!((config.grid.x, config.block.count()), (64, 512));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LaunchConfig {
    /// Blocks.
    pub grid: Dim3,
    /// Threads a block.
    pub block: Dim3,
    /// Dynamic shared memory a block, in bytes.
    pub dynamic_shared: u32,
}

impl LaunchConfig {
    /// Without dynamic shared memory.
    #[must_use]
    pub fn new(grid: impl Into<Dim3>, block: impl Into<Dim3>) -> Self {
        Self { grid: grid.into(), block: block.into(), dynamic_shared: 0 }
    }

    /// With that much dynamic shared memory a block, in bytes.
    #[must_use]
    pub const fn with_dynamic_shared(mut self, bytes: u32) -> Self {
        self.dynamic_shared = bytes;
        self
    }
}
