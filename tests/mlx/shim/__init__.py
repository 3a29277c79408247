"""Metal kernels as C++: compiled with the machine's compiler and run thread by thread on the CPU."""
