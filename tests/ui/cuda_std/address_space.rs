use cuda_std::address_space;

#[address_space(local)]
static mut A: u32 = 0;

#[address_space(texture)]
static B: u32 = 0;

#[address_space(shared)]
static C: u32 = 0;

#[address_space(constant)]
static D: u32 = 0;

fn main() {}
